"""Html: a document as one page for a browser, or as PDF by WeasyPrint. [I/O]"""

import base64
import hashlib
import logging
from functools import cache

from homenode.doc import Cell, Doc, Words, format_plain, spans
from homenode.errors import HostError
from homenode.package_data import read_package_text
from homenode.show.svg_canvas import CHART, PICTURE, read_css
from homenode.text import printable

_DRAWINGS = "svg.map"
_HATCHED = "".join(
    f"svg.map [data-hatch={name}]{{fill:url(#{name})}}" for name in ("taken", "barred")
)
_WORD_JOINER = "\u2060"
SIGNED_END = b"\n% homenode\n"
"""The mark at the end of homenode's PDFs; their beginning is compressed."""


def render_page(doc: Doc) -> str:
    """Return the document as a page without network requests. Its policy allows only its own style
    sheet and script, by digest."""
    style = (
        _read_template("page.css")
        + read_css(*CHART)
        + read_css(PICTURE, scope=_DRAWINGS)
        + _HATCHED
    )
    script = _read_template("page.js")
    policy = (
        f"default-src 'none'; style-src {_compute_digest(style)}; "
        f"script-src {_compute_digest(script)}; base-uri 'none'; form-action 'none'"
    )
    return _render(doc, style=style, script=script, policy=policy, paper=False)


def render_paper_html(doc: Doc) -> str:
    """Return the document for printing: without script, nothing folded."""
    return _render(doc, style=_read_template("paper.css"), script="", policy="", paper=True)


def render_pdf(html: str) -> bytes:
    """Return a report as PDF. Raises HostError without WeasyPrint. Every URL in the document is
    rejected, so nothing is fetched."""
    try:
        from weasyprint import HTML
        from weasyprint.urls import URLFetcher
    except ImportError as error:
        raise missing_extra(error.name or "weasyprint") from None
    except OSError as error:  # Pango is a system library, loaded at import
        raise HostError(
            f"report: the library Pango cannot be loaded: {str(error).splitlines()[0]}",
            hint="Debian, Ubuntu: apt install libpango-1.0-0 libpangoft2-1.0-0; or write .html",
        ) from None
    logging.getLogger("weasyprint").setLevel(logging.ERROR)
    logging.getLogger("fontTools").setLevel(logging.ERROR)
    fetches_nothing = URLFetcher(allowed_protocols=())
    content = HTML(string=html, url_fetcher=fetches_nothing).write_pdf()
    assert isinstance(content, bytes)  # as no target file is given
    return content + SIGNED_END


def missing_extra(module: str) -> HostError:
    """Return the message for a missing library of the extra."""
    return HostError(
        f"report: Python package {module} is not installed",
        hint="pip install 'homenode[report]'",
    )


def _render(doc: Doc, **values: object) -> str:
    try:
        from jinja2 import DictLoader, Environment, StrictUndefined
        from markupsafe import Markup
    except ImportError as error:
        raise missing_extra(error.name or "jinja2") from None
    environment = Environment(
        loader=DictLoader({"page": _read_template("page.html.j2")}),
        autoescape=True,
        undefined=StrictUndefined,
        finalize=_format_shown,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    is_paper = bool(values["paper"])

    def draw(svg: str) -> Markup:
        # Drawings are built as elements, the style sheet and the script come from homenode: all
        # other text is escaped.
        return Markup(_insert_style(svg) if is_paper else svg)  # noqa: S704

    environment.filters |= {
        "drawn": draw,
        "spans": spans,
        "cell": _escape_cell,
        "name": _name,
        "kind": lambda part: type(part).__name__,
    }
    return environment.get_template("page").render(doc=doc, **values)


def _escape_cell(cell: Words | Cell) -> Cell:
    return cell if isinstance(cell, Cell) else Cell((cell,))


def _name(head: Words | Cell) -> str:
    """Return the first line of a heading."""
    return format_plain(head.lines[0] if isinstance(head, Cell) else head)


def _insert_style(svg: str) -> str:
    """Embed the style sheet in a chart, for a renderer that loads no other files."""
    head, end, body = svg.partition(">")
    if 'class="chart"' not in head:
        return svg
    return f"{head}{end}<style>{read_css('chart')}</style>{body}"


def _format_shown(value: object) -> object:
    """Remove terminal escapes and text direction controls. A number and its percent sign stay on
    one line, as do units with word joiners. Markup is not changed."""
    if type(value) is not str:
        return value
    value = _WORD_JOINER.join(map(printable, value.split(_WORD_JOINER)))
    return value.replace(" %", "\u00a0%").replace("events/s", f"events/{_WORD_JOINER}s")


def _compute_digest(text: str) -> str:
    digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
    return f"'sha256-{digest}'"


@cache
def _read_template(name: str) -> str:
    return read_package_text("show", "templates", name)
