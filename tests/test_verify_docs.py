"""Every kind of finding that verification gives is listed where users look for it."""

from collections.abc import Iterator
from pathlib import Path

from tests.doc_pages import ROOT, read_page
from tests.finding_ids import ids_given

_VERIFY = ROOT / "src/homenode/verify"
_FILES = (
    *sorted(path for path in _VERIFY.rglob("*.py") if path.parent.name != "live"),
    ROOT / "src/homenode/domain/crosscheck.py",
    ROOT / "src/homenode/domain/pci_windows.py",
)
_PREFIX = {"Finding": "", "Broken": "", "differs": "plan-", "check": "guest-", "_groups": "guest-"}


def ids(path: Path) -> Iterator[str]:
    """Ids with the prefix that the function that makes the finding gives them."""
    for name, prefix in _PREFIX.items():
        yield from (prefix + one for one in ids_given(path, {name}))


def test_every_finding_of_verify_is_documented() -> None:
    stated = read_page("docs/commands/verify.md").words_in_code()
    made = {name for path in _FILES for name in ids(path)}
    assert len(made) > 50
    assert not sorted(made - stated)


def test_no_finding_is_documented_that_nothing_makes() -> None:
    page = read_page("docs/commands/verify.md").sections()
    made = {name for path in _FILES for name in ids(path)}
    for heading in ("What the document check finds", "What a guest is asked"):
        rows = (line for line in page[heading].splitlines() if line.startswith("| `"))
        cells = (row.split("|")[1] for row in rows)
        stated = {word.strip(" `") for cell in cells for word in cell.split(",")}
        assert not sorted(stated - made), heading
