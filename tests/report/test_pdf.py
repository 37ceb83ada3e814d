"""The report on paper: every page inside its margins, every section there, nothing fetched."""

import re
import shutil
from pathlib import Path
from xml.etree import ElementTree

import pytest

from homenode.process import run
from homenode.show.html import render_pdf
from tests.published_runs import DIRECTORY
from tests.report_runs import NASTY, full_results, nasty_results, report


def has_weasyprint() -> bool:
    try:
        import weasyprint  # noqa: F401 - its libraries may be missing
    except (ImportError, OSError):
        return False
    return True


pytestmark = [
    pytest.mark.pdf,
    # A text is evaluated before the test: each process that collects would import it, 0.5 s.
    pytest.mark.skipif("not has_weasyprint()", reason="WeasyPrint cannot be used here"),
    pytest.mark.skipif(shutil.which("pdftotext") is None, reason="no pdftotext"),
]


@pytest.fixture(scope="module")
def whole_pdf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Everything that the report draws, what was published, and names that mean harm."""
    directory = tmp_path_factory.mktemp("whole")
    path = directory / "report.pdf"
    results = [full_results(directory / "full"), nasty_results(directory / "nasty")]
    published = [DIRECTORY / name for name in ("h200", "rtx-5090")]
    assert report(*results, *published, "--appendix", "-o", path) == 0
    return path


def pages(path: Path) -> list[ElementTree.Element]:
    """Each page with the boxes of its words."""
    text = run(("pdftotext", "-bbox", str(path), "-"), timeout_s=60).stdout
    found = ElementTree.fromstring(re.sub(r' xmlns="[^"]*"', "", text, count=1))
    return list(found.iter("page"))


def words(path: Path) -> str:
    return " ".join(word.text or "" for page in pages(path) for word in page.iter("word"))


@pytest.mark.nightly
def test_no_word_of_any_page_is_cut_off(whole_pdf: Path) -> None:
    found = pages(whole_pdf)
    assert len(found) > 5
    for number, page in enumerate(found, start=1):
        width, height = float(page.get("width", 0)), float(page.get("height", 0))
        assert width > height, "landscape: the summary is wide"
        margin = 20.0  # points; the page's own are 34 at its sides
        inside = list(page.iter("word"))
        assert len(inside) > 5, f"page {number} is as good as empty"
        for word in inside:
            assert float(word.get("xMin", 0)) >= margin, f"page {number}: {word.text}"
            assert float(word.get("xMax", 0)) <= width - margin, f"page {number}: {word.text}"
            assert float(word.get("yMin", 0)) >= margin, f"page {number}: {word.text}"
            assert float(word.get("yMax", 0)) <= height - 10, f"page {number}: {word.text}"


@pytest.mark.nightly
def test_everything_that_is_folded_on_a_screen_is_on_paper(whole_pdf: Path) -> None:
    text = words(whole_pdf)
    names = ("Which layout to run", "Effects and risks", "What is measured", "Caveats (")
    for stated in (*names, "Environment", "Sources", "561.2", "page 1 of", NASTY.partition(">")[0]):
        assert stated in text, stated


@pytest.mark.nightly
def test_no_page_is_half_empty_and_a_machine_takes_few(whole_pdf: Path) -> None:
    found = pages(whole_pdf)
    assert len(found) <= 18
    lowest_of = []
    for page in found[:-1]:
        height = float(page.get("height", 0))
        ends = [float(word.get("yMax", 0)) for word in page.iter("word")]
        lowest = max(end for end in ends if end < height - 32)  # below it is the page's number
        lowest_of.append(lowest / height)
    assert sum(one < 0.5 for one in lowest_of) <= 1, "but before a topology, which takes a page"
    text = words(whole_pdf)
    for stated in ("RTX 5090", "GeForce RTX 5090"):
        assert stated in text, stated


@pytest.mark.nightly
def test_what_was_published_is_a_paper_of_eight_pages(tmp_path: Path) -> None:
    path = tmp_path / "published.pdf"
    assert report(DIRECTORY, "-o", path) == 0
    assert len(pages(path)) <= 8
    text = words(path)
    parts = ("What to run", "2.6x to 7.5x", "repair first", "Xen, 2 nodes", "Intervals: 95 %")
    assert not [stated for stated in parts if stated not in text]


def test_a_paper_is_made_again_in_place_and_another_program_s_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "report.pdf"
    assert report(DIRECTORY / "rtx-4080", "-o", path) == 0
    assert report(DIRECTORY / "rtx-4080", "-o", path) == 0
    path.write_bytes(b"%PDF-1.7\n" + bytes(9000) + b"%%EOF\n")
    assert report(DIRECTORY / "rtx-4080", "-o", path) == 2


def test_nothing_is_fetched_for_paper(tmp_path: Path) -> None:
    secret = tmp_path / "secret.txt"
    secret.write_text("secret", encoding="utf-8")
    at = secret.as_uri()
    paper = render_pdf(
        f'<p>text<img src="{at}"><a rel="attachment" href="{at}">'
        f'<link rel="attachment" href="{at}"></p>'
    )
    assert paper.startswith(b"%PDF")
    assert b"secret" not in paper
    assert b"EmbeddedFile" not in paper
