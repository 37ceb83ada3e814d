"""The report in a real browser: it asks for nothing, sorts, draws, and can be read."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.chromium import Tab, needs_chromium, opened_tab
from tests.published_runs import DIRECTORY
from tests.report_runs import NASTY, nasty_results, report

pytestmark = [pytest.mark.browser, needs_chromium]

ENTER, TAB_KEY, SPACE = ("Enter", 13), ("Tab", 9), (" ", 32)
FIRST_PAINT_MS = 2000
MAX_BYTES = 3_000_000


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Everything that was published: the six systems of the study in four layouts, and more."""
    path = tmp_path_factory.mktemp("report") / "report.html"
    assert report(DIRECTORY, "-o", path) == 0
    return path


@pytest.fixture(scope="module")
def tab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tab]:
    with opened_tab(tmp_path_factory.mktemp("profile")) as opened:
        yield opened


def _column(tab: Tab, number: int) -> list[str]:
    script = (
        f"[...document.querySelectorAll('table.summary tbody tr td:nth-child({number})')]"
        ".map(cell => cell.textContent)"
    )
    found = tab.value(script)
    assert isinstance(found, list)
    return found


def _sorts(tab: Tab) -> list[str]:
    found = tab.value(
        "[...document.querySelectorAll('table.summary th')].map(h => h.getAttribute('aria-sort'))"
    )
    assert isinstance(found, list)
    return found


def _figures(texts: list[str]) -> list[float]:
    return [float(text.replace(",", "")) for text in texts if text]


def test_the_page_asks_for_nothing_and_complains_of_nothing(page: Path, tab: Tab) -> None:
    tab.complaints.clear()
    tab.requests.clear()
    tab.open(page, width=1280)
    tab.value("document.querySelectorAll('details').forEach(one => one.open = true)")
    tab.value("window.scrollTo(0, document.body.scrollHeight)")
    assert tab.complaints == []
    assert tab.requests == [page.as_uri()]


def test_the_page_is_small_and_painted_at_once(page: Path, tab: Tab) -> None:
    assert page.stat().st_size < MAX_BYTES
    painted: list[float] = []
    while len(painted) < 20 and not any(one < FIRST_PAINT_MS for one in painted):
        tab.open(page, width=1280)  # again where neighbours took the processor meanwhile
        painted.append(
            tab.value("performance.getEntriesByName('first-contentful-paint')[0].startTime")
        )
    assert min(painted) < FIRST_PAINT_MS


def test_scripts_and_images_of_others_are_forbidden(page: Path, tab: Tab, tmp_path: Path) -> None:
    changed = tmp_path / "changed.html"
    planted = (
        "<script>window.planted = 1</script><img src='http://192.0.2.1/x.png' "
        "onerror='window.planted = 2'></main>"
    )
    changed.write_text(page.read_text(encoding="utf-8").replace("</main>", planted))
    tab.open(changed, width=1280)
    assert tab.value("window.planted === undefined")
    assert any("Content Security Policy" in complaint for complaint in tab.complaints)


def test_a_column_sorts_by_mouse_up_and_down(page: Path, tab: Tab) -> None:
    tab.open(page, width=1280)
    assert set(_sorts(tab)) == {"none"}
    as_written = _column(tab, 6)
    tab.click("table.summary th:nth-child(6) button")
    up = _column(tab, 6)
    assert _figures(up) == sorted(_figures(as_written))
    assert up[-1] == "", "what has no figure comes last"
    assert _sorts(tab)[5] == "ascending"
    tab.click("table.summary th:nth-child(6) button")
    down = _column(tab, 6)
    assert _figures(down) == sorted(_figures(as_written), reverse=True)
    assert down[-1] == ""
    assert _sorts(tab)[5] == "descending"
    assert _sorts(tab).count("none") == len(_sorts(tab)) - 1


def test_a_column_sorts_by_keyboard_alone(page: Path, tab: Tab) -> None:
    tab.open(page, width=1280)
    tab.value("document.querySelector('table.summary th:nth-child(2) button').focus()")
    tab.press(*ENTER)
    assert _sorts(tab)[1] == "ascending"
    assert _column(tab, 2) == sorted(_column(tab, 2), key=str.casefold)
    tab.press(*TAB_KEY)
    tab.press(*SPACE)
    assert _sorts(tab)[2] == "ascending"
    assert tab.value("getComputedStyle(document.activeElement).outlineStyle") == "solid"


def test_tab_reaches_the_verdicts_first_and_every_wide_table(page: Path, tab: Tab) -> None:
    tab.open(page, width=400)
    tab.press(*TAB_KEY)
    assert tab.value("document.activeElement.className") == "skip"
    regions = "document.querySelectorAll('.scroll, .map-scroll')"
    assert tab.value(f"[...{regions}].every(r => r.tabIndex === 0 && r.ariaLabel)")


@pytest.mark.parametrize(("place", "least_charts"), [("answers", 4), ("appendix", 40)])
@pytest.mark.parametrize("width", [1280, 400])
def test_nothing_sticks_out_and_charts_are_drawn(
    page: Path, tab: Tab, width: int, place: str, least_charts: int
) -> None:
    tab.open(page, width=width)
    tab.value(f"location.hash = '{place}'")
    tab.wait("document.querySelector(':target') !== null")
    assert tab.value("getComputedStyle(document.querySelector('#data')).display") == (
        "none" if place == "appendix" else "block"
    ), "details are on a page of their own"
    tab.value("document.querySelectorAll('details').forEach(one => one.open = true)")
    assert tab.value("document.documentElement.scrollWidth") <= width
    captions = "[...document.querySelectorAll('caption span')].filter(c => c.offsetParent)"
    assert tab.value(f"{captions}.length") > 0 or place == "appendix", "tables of measured runs"
    assert tab.value(f"{captions}.every(c => c.getBoundingClientRect().right <= {width})")
    charts = tab.value(
        "[...document.querySelectorAll('svg.chart')].filter(c => c.parentNode.offsetParent)"
        ".map(c => {"
        " const b = c.getBoundingClientRect();"
        " return [b.width, b.height, c.querySelectorAll('text').length] })"
    )
    assert len(charts) >= least_charts
    assert all(box[0] >= 300 and box[1] > 20 and box[2] > 0 for box in charts)
    least = tab.value(
        "Math.min(...[...document.querySelectorAll('svg.chart text')]"
        ".filter(t => t.ownerSVGElement.parentNode.offsetParent).map(t =>"
        " t.getAttribute('font-size') * t.ownerSVGElement.getBoundingClientRect().width"
        " / t.ownerSVGElement.viewBox.baseVal.width))"
    )
    assert least >= 6.9


@pytest.mark.parametrize("dark", [False, True])
def test_text_stands_out_from_its_ground_in_light_and_dark(
    page: Path, tab: Tab, dark: bool
) -> None:
    tab.open(page, width=1280, dark=dark)
    tab.value("document.querySelectorAll('details').forEach(one => one.open = true)")
    weak = tab.value(_CONTRAST)
    assert weak == []


def test_on_paper_everything_is_unfolded_and_black_on_white(page: Path, tab: Tab) -> None:
    tab.open(page, width=1280)
    folded = "document.querySelectorAll('details:not([open])').length"
    assert tab.value(folded) > 0
    tab.value("window.dispatchEvent(new Event('beforeprint'))")
    tab.media(paper=True)
    assert tab.value(folded) == 0
    assert tab.value("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    tab.value("window.dispatchEvent(new Event('afterprint'))")
    tab.media()
    assert tab.value(folded) > 0


_CONTRAST = """(() => {
  const channel = c => { c /= 255; return c <= 0.03928 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4 };
  const parse = s => s.match(/[\\d.]+/g).map(Number);
  const light = ([r, g, b]) => 0.2126 * channel(r) + 0.7152 * channel(g) + 0.0722 * channel(b);
  const ground = element => {
    for (let e = element; e; e = e.parentElement) {
      const c = parse(getComputedStyle(e).backgroundColor);
      if (c.length < 4 || c[3] > 0) return c;
    }
    return [255, 255, 255];
  };
  const weak = [];
  const texts = 'h1, h2, h3, h4, p, a, td, th, dt, dd, li, span, figcaption, summary, button';
  for (const element of document.querySelectorAll(texts)) {
    if (![...element.childNodes].some(n => n.nodeType === 3 && n.textContent.trim())) continue;
    const a = light(parse(getComputedStyle(element).color)), b = light(ground(element));
    const ratio = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
    if (ratio < 4.5) weak.push([element.tagName, element.className, ratio, element.textContent]);
  }
  return weak;
})()"""


def test_names_of_results_stay_text(tab: Tab, tmp_path: Path) -> None:
    results = nasty_results(tmp_path / "results")
    path = tmp_path / "nasty.html"
    assert report(results, "-o", path) == 0
    tab.complaints.clear()
    tab.open(path, width=1280)
    assert tab.value("window.owned === undefined")
    assert tab.complaints == []
    assert tab.value("document.querySelectorAll('script').length") == 1
    assert tab.value(
        f"document.querySelector('.decisions .name').textContent === {json.dumps(NASTY)}"
    )


@pytest.mark.parametrize("width", [1600, 1280, 800, 380])
def test_long_names_stay_in_their_cells_and_in_the_window(
    tab: Tab, tmp_path: Path, width: int
) -> None:
    path = tmp_path / "nasty.html"
    assert report(nasty_results(tmp_path / "results"), "-o", path) == 0
    tab.open(path, width=width)
    tab.value("document.querySelectorAll('details').forEach(one => one.open = true)")
    assert tab.value("document.documentElement.scrollWidth") <= width
    wide = "[...document.querySelectorAll('td, th')].filter(c => c.scrollWidth > c.clientWidth + 1)"
    assert tab.value(f"{wide}.map(c => c.textContent)") == []


def test_the_summary_needs_no_scrolling_in_a_wide_window(page: Path, tab: Tab) -> None:
    tab.open(page, width=1600)
    assert tab.value(
        "(r => r.scrollWidth <= r.clientWidth)(document.querySelector('#data .scroll'))"
    )
