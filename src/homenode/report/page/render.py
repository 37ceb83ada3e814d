"""Render: a report's HTML, from the templates that come with homenode. [I/O]"""

import base64
import hashlib
from functools import cache

from homenode.errors import HostError
from homenode.package_files import package_names, package_text
from homenode.report.page.document import Document
from homenode.report.palette import chart_style, style_sheet
from homenode.wording import printable

_HATCHED = "".join(
    f"svg.map [data-hatch={name}]{{fill:url(#{name})}}" for name in ("taken", "barred")
)
_TEMPLATES = ("report", "page", "templates")
_WORD_JOINER = "\u2060"


def report_html(report: Document) -> str:
    """The report as one HTML page that asks the network for nothing.

    Its policy forbids everything but its own style sheet and script, by their digests.
    """
    style = (
        package_text("report", "templates", "page.css")
        + chart_style()
        + style_sheet("svg.map")
        + _HATCHED
    )
    script = _shared("page.js")
    policy = (
        f"default-src 'none'; style-src {_digest(style)}; script-src {_digest(script)}; "
        "base-uri 'none'; form-action 'none'"
    )
    return _render(report, style=style, script=script, policy=policy, pdf=False)


def report_for_print(report: Document) -> str:
    """The report as HTML for a renderer of pages: no script, nothing folded."""
    return _render(
        report,
        style=_shared("paper.css"),
        script="",
        policy="",
        pdf=True,
    )


def _render(report: Document, **values: object) -> str:
    try:
        from jinja2 import DictLoader, Environment, StrictUndefined
        from markupsafe import Markup
    except ImportError as error:
        raise missing_extra(error.name or "jinja2") from None
    environment = Environment(
        loader=DictLoader({name: _text(name) for name in _names() if name.endswith(".j2")}),
        autoescape=True,
        undefined=StrictUndefined,
        finalize=_shown,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    # Drawings are built as elements, the style sheet and the script are ours: nothing else is let
    # through unescaped.
    dressed = _styled if values["pdf"] else str
    environment.filters["picture"] = lambda svg: Markup(dressed(svg))  # noqa: S704
    return environment.get_template("report.html.j2").render(report=report, **values)


def _styled(svg: str) -> str:
    """A chart with its style sheet inside, for a renderer that does not look outside."""
    head, end, rest = svg.partition(">")
    if 'class="chart"' not in head:
        return svg
    return f"{head}{end}<style>{chart_style(dark=False)}</style>{rest}"


def _shown(value: object) -> object:
    """A text with nothing that steers a terminal, or turns the direction of what follows.

    A figure and its percent sign stay on one line, as do units with word joiners in them. What is
    markup already is left alone.
    """
    if type(value) is not str:
        return value
    return _WORD_JOINER.join(map(printable, value.split(_WORD_JOINER))).replace(" %", "\u00a0%")


def missing_extra(module: str) -> HostError:
    """What to say where a library of the extra is not there."""
    return HostError(
        f"report: expected the Python package {module}, found none",
        hint="pip install 'homenode[report]'",
    )


def _digest(text: str) -> str:
    found = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
    return f"'sha256-{found}'"


@cache
def _names() -> tuple[str, ...]:
    return package_names(*_TEMPLATES)


@cache
def _text(name: str) -> str:
    return package_text(*_TEMPLATES, name)


def _shared(name: str) -> str:
    return package_text("report", "templates", name)
