"""A document, whatever its texts are: the same letters on a terminal, on a page and on paper."""

import io
import re
from functools import cache
from html import unescape

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from homenode.doc import (
    LOOKS,
    Cell,
    Commands,
    Doc,
    Gallery,
    Items,
    Picture,
    Section,
    Span,
    Table,
    Text,
    Tree,
)
from homenode.show.html import render_page, render_paper_html
from homenode.show.svg_canvas import SvgCanvas
from homenode.show.terminal_text import PrintableConsole
from homenode.text import printable
from tests.report.test_page import parsed
from tests.seeds import draws

HOSTILE = st.text(st.sampled_from("ab <>&\"'{}%=/\\\x1b\u202e\n"), min_size=1, max_size=12)


def doc_of(text: str) -> Doc:
    """A document with the text wherever one can stand."""
    canvas = SvgCanvas.start_chart(text)
    canvas.draw_text(0, 10, text)
    cell = Cell((Span(text, "dim", "s"), (text, Span(text, "bad"))), "best", text)
    table = Table(
        heads=(text, Cell((text, Span(text, "dim")))),
        rows=((text, cell), (Cell((text,), across=2),)),
        caption=text,
        name=text,
    )
    parts = (
        Text((text, Span(text, "bold")), "warn", 2),
        Items((text, (Span(text, "dim"),))),
        Commands((text,)),
        Tree(text, (Tree((text, Span(text, "bold"))),)),
        table,
        Gallery((Picture(text, canvas.serialize(20), (text,)),)),
        Section(text, (Text(text),), is_open=False),
    )
    return Doc(text, (Section(text, parts, "s", text, text),), text, text)


@cache
def attributes_of_a_page() -> frozenset[str]:
    return frozenset(name for name, _ in parsed(render_page(doc_of("a"))).attributes)


@settings(max_examples=draws(75))
@given(HOSTILE)
def test_no_text_is_markup_of_a_page_and_none_is_lost(text: str) -> None:
    doc = doc_of(text)
    for html in (render_page(doc), render_paper_html(doc)):
        found = parsed(html)
        assert {name for name, _ in found.attributes} <= attributes_of_a_page()
        assert found.tags.count("script") == ("Content-Security-Policy" in html)
        assert not [letter for letter in "\x1b\u202e" if letter in html]
        body = unescape(re.sub(r"<[^>]*>", "", html.partition("<body>")[2]))
        assert body.count(printable(text).replace(" %", "\u00a0%").strip()) >= 10


@given(HOSTILE, st.sampled_from([20, 60, 200]))
def test_no_text_steers_a_terminal_or_is_markup_of_it(text: str, width: int) -> None:
    out = io.StringIO()
    PrintableConsole(file=out, width=width, color_system=None).print(doc_of(text))
    assert out.getvalue().replace("\n", "").isprintable()


def printed(table: Table, width: int) -> list[str]:
    out = io.StringIO()
    PrintableConsole(file=out, width=width, color_system=None).print(Doc("", (table,)))
    return [line.rstrip() for line in out.getvalue().splitlines() if line.strip()]


@pytest.mark.parametrize(
    ("width", "first"), [(80, "name    figure  why"), (30, "name    figure"), (13, "host-1:")]
)
def test_a_table_is_folded_then_shortened_then_a_paragraph_a_row(width: int, first: str) -> None:
    why = "a sentence that is longer than the column may be"
    heads = ("name", "figure", "why")
    table = Table(heads=heads, rows=(("host-1", "12", why),), folds=heads[-1:])
    lines = printed(table, width)
    assert lines[0] == first
    assert " ".join(" ".join(lines).split()).count("12") == 1
    assert all(len(line) <= width for line in lines)


@pytest.mark.parametrize(
    ("width", "heads"),
    [
        (40, "layout pinning siblings memory least"),
        (36, "layout pinning siblings memory"),
        (30, "layout pinning memory"),
        (20, "layout memory"),
    ],
)
def test_columns_go_from_the_right_except_the_last_and_are_named(width: int, heads: str) -> None:
    names = ("layout", "pinning", "siblings", "least", "memory")
    rows = (("pin", "one CPU", "hidden", "x", "bound"),)
    lines = printed(Table(heads=names, rows=rows, least=("least",)), width)
    assert sorted(lines[0].split()) == sorted(heads.split())
    omitted = [name for name in names if name not in heads.split()]
    note = f"not shown, the terminal is too narrow: {', '.join(omitted)}"
    assert " ".join(lines[2:]) == (note if omitted else "")


def test_what_is_sorted_linked_and_folded_on_a_page_is_plain_on_paper() -> None:
    table = Table(
        heads=("a", "b"),
        rows=((Cell((Span("x", link="s"),)), Cell(("1.5",), order=1.5)),),
        numeric=("b",),
        is_sortable=True,
    )
    doc = Doc(
        "t", (Section("s", (table, Section("more", (Text("in"),), is_open=False)), "s", "S"),)
    )
    page, paper = render_page(doc), render_paper_html(doc)
    for there in ('<a href="#s">x</a>', "<button", "<details><summary>more", "<nav aria-label"):
        assert there in page and there not in paper
    assert '<td class="number" data-label="b" data-order="1.5">1.5</td>' in page


def test_every_look_of_a_terminal_has_a_class_of_the_style_sheet() -> None:
    style = render_page(Doc("t", ())).partition("<style>")[2].partition("</style>")[0]
    assert not [look for look in LOOKS if not re.search(rf"\.{look}\b", style)]


def test_a_cell_across_columns_has_no_label_and_those_after_it_their_own() -> None:
    row = ("machine", Cell(("repair first",), across=2), "Fix the link")
    page = render_page(Doc("t", (Table(heads=("of", "a", "b", "authors"), rows=(row,)),)))
    assert '<td data-label="authors">Fix the link</td>' in page
    assert 'data-label="a"' not in page
