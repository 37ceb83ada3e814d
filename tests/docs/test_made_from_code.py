"""README's demonstration and pictures and the page of records are what the code makes today."""

import re
from pathlib import Path

from demo import run

from homenode.errors import (
    DONE,
    EXIT_CODES,
    FINDINGS,
    HOST,
    INTERRUPTED,
    NOT_KNOWN,
    UNPLANNABLE,
    USAGE,
)
from homenode.vm.layout import PRESETS
from tests import record_page
from tests.doc_pages import ROOT
from tests.doc_pictures import IMAGES, pictures


def test_the_pictures_of_readme_are_made_by_homenode_as_it_is(tmp_path: Path) -> None:
    made = pictures(tmp_path)
    stored = {one.name: one.read_text(encoding="utf-8") for one in IMAGES.iterdir()}
    stale = {name for name in made.keys() | stored.keys() if made.get(name) != stored.get(name)}
    assert not stale, "python -m tests.doc_pictures DIR writes them"
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert all(f"docs/images/{name}" in readme for name in made)


def test_the_page_of_records_says_what_fields_mean() -> None:
    lines = record_page.page().splitlines()
    listed = {word for line in lines if line.startswith("* `") for word in line.split("`")}
    rows = [line.strip("| ").split(" | ") for line in lines if line.startswith("| `")]
    silent = [row[0] for row in rows if len(row) < 4 and row[0].strip("`") not in listed]
    assert len(rows) > 400 and len(silent) < 12, silent


def test_the_page_of_compatibility_has_every_exit_code() -> None:
    page = (ROOT / "docs/reference/compatibility.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `(\d+)` \| ([^|]+) \|", page, re.MULTILINE)
    promised = (DONE, FINDINGS, USAGE, HOST, UNPLANNABLE, NOT_KNOWN, INTERRUPTED)
    assert promised == (0, 1, 2, 3, 4, 5, 130)
    assert {int(code): meaning for code, meaning in rows} == {
        **EXIT_CODES,
        INTERRUPTED: "interrupted",
    }


def test_plans_every_preset_on_both_machines(tmp_path: Path) -> None:
    assert run.main(tmp_path) == 0
    for name, _, _ in run.MACHINES:
        tuned = {path.stem for path in (tmp_path / name).glob("*.xml")}
        assert tuned == set(PRESETS)
        assert (tmp_path / name / f"{run.DRAWN}.svg").read_text().startswith("<svg")
    assert (tmp_path / run.REPORT).stat().st_size > 100_000
