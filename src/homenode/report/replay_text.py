"""ReplayText: what policies came to in a simulation, as a table and as a page with a chart."""

from collections.abc import Sequence
from html import escape

from rich.console import Group, RenderableType
from rich.text import Text

from homenode.pool.replay.simulation import Figure, Simulation
from homenode.report.palette import CELL_COLOURS
from homenode.report.svg_canvas import SvgCanvas
from homenode.report.terminal_text import AsciiWhereNeeded, TableOrList
from homenode.wording import plural, printable

_WIDTH, _HEIGHT, _LEFT, _TOP = 760.0, 300.0, 60.0, 14.0


def simulation_text(simulation: Simulation) -> RenderableType:
    """A row for each policy; then the bound."""
    head = f"simulated: {simulation.what}; {plural(simulation.orders, 'order')}"
    return AsciiWhereNeeded(
        Group(
            Text(printable(head), style="bold"),
            TableOrList(_columns(simulation), _rows(simulation)),
            Text(_bound(simulation.bound)),
        )
    )


def _columns(simulation: Simulation) -> list[str]:
    names = [one.name.replace("_percent", " %") for one in simulation.outcomes[0].figures]
    return ["policy", *(name.replace("_", " ") for name in names)]


def _rows(simulation: Simulation) -> list[list[str]]:
    return [[one.policy, *map(_figure, one.figures)] for one in simulation.outcomes]


def _figure(one: Figure) -> str:
    if one.low is None or one.high is None:
        return _short(one.mean)
    return f"{_short(one.mean)} ±{one.high - one.mean:.2f}"


def _short(value: float) -> str:
    return f"{value:.0f}" if value == int(value) else f"{value:.2f}"


def _bound(bound: Figure | None) -> str:
    if bound is None:
        return "± is the interval of 95 % of the mean over orders"
    name = bound.name.replace("_percent", " %")
    return (
        f"± is the interval of 95 % of the mean over orders; no policy can better {name} "
        f"{bound.mean:.2f} (linear program that knows all arrivals)"
    )


def simulation_page(simulation: Simulation) -> str:
    """A page: no scripts, nothing from elsewhere."""
    head = "".join(f"<th>{escape(name)}</th>" for name in _columns(simulation))
    rows = "".join(
        "<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>"
        for row in _rows(simulation)
    )
    return (
        '<!doctype html><html lang="en"><meta charset="utf-8"><title>homenode pool simulate'
        '</title><meta name="viewport" content="width=device-width"><style>body{font:15px/1.4 '
        "system-ui,sans-serif;max-width:800px;margin:2em auto;padding:0 1em;color:#1b1f24}table"
        "{border-collapse:collapse}td,th{padding:3px 12px;border-bottom:1px solid #d0d7de;"
        "text-align:right}td:first-child,th:first-child{text-align:left}svg{max-width:100%;"
        f"height:auto}}</style><h1>Simulated: {escape(printable(simulation.what))}</h1>"
        f"<p>{plural(simulation.orders, 'order')}; no VM ran. {escape(_bound(simulation.bound))}."
        f"</p>{_chart(simulation)}<table><tr>{head}</tr>{rows}</table></html>\n"
    )


def _chart(simulation: Simulation) -> str:
    """The curves of the first order."""
    curves = [(one.policy, one.curve) for one in simulation.outcomes if len(one.curve) > 1]
    if not curves:
        return ""
    css = ".page{fill:#fff}.ink{fill:#1b1f24}.dim{fill:#57606a}.axis{stroke:#d0d7de;fill:none}"
    css += "".join(
        f".c{i}{{stroke:{colour.fill};fill:none;stroke-width:1.6}}"
        for i, colour in enumerate(CELL_COLOURS)
    )
    x_name, y_name = simulation.curve_of
    canvas = SvgCanvas.document(_WIDTH, f"{y_name} over {x_name}", "one curve a policy", css)
    right = max(x for _, curve in curves for x, _ in curve) or 1.0
    top = max(y for _, curve in curves for _, y in curve) or 1.0

    def at(x: float, y: float) -> tuple[float, float]:
        return (
            _LEFT + (_WIDTH - _LEFT - 10) * x / right,
            _TOP + (_HEIGHT - _TOP) * (1 - y / top),
        )

    for part in range(5):
        y = top * part / 4
        canvas.line(at(0, y), at(right, y), classes="axis")
        canvas.text(_LEFT - 6, at(0, y)[1] + 4, _number(y), 10, "dim", anchor="end")
        x = right * part / 4
        canvas.text(at(x, 0)[0], _HEIGHT + 16, _number(x), 10, "dim", anchor="middle")
    canvas.text(_WIDTH / 2, _HEIGHT + 32, x_name, 11, "dim", anchor="middle")
    canvas.text(4, 10, y_name, 11, "dim")
    for number, (name, curve) in enumerate(curves):
        colour = number % len(CELL_COLOURS)
        canvas.line(*(at(x, y) for x, y in _thinned(curve)), classes=f"c{colour}", title=name)
        left = _LEFT + number % 4 * 170
        row = _HEIGHT + 52 + number // 4 * 18
        canvas.line((left, row - 4), (left + 24, row - 4), classes=f"c{colour}")
        canvas.text(left + 30, row, name, 11)
    return canvas.svg(_HEIGHT + 60 + (len(curves) - 1) // 4 * 18)


def _thinned(
    curve: Sequence[tuple[float, float]], most: int = 400
) -> Sequence[tuple[float, float]]:
    return curve[:: max(1, len(curve) // most)]


def _number(value: float) -> str:
    return f"{value:.0f}" if value >= 10 else f"{value:.2f}"
