"""ReplayText: what policies came to in a simulation, as a table and as a page with a chart."""

import math
from collections.abc import Iterator, Sequence

from homenode.cluster.pool.replay.simulation import Figure, Simulation
from homenode.doc import Doc, Gallery, Picture, Table, Text
from homenode.show.charts.bars import Scale
from homenode.show.palette import SERIES
from homenode.show.svg_canvas import SvgCanvas
from homenode.wording import plural

_WIDTH, _HEIGHT, _LEFT, _TOP = 760.0, 300.0, 60.0, 14.0


def simulation_text(simulation: Simulation) -> Doc:
    """A row for each policy; then the bound."""
    head = f"simulated: {simulation.what}; {plural(simulation.orders, 'order')}"
    return Doc(head, (_table(simulation), Text(_notes(simulation))))


def _table(simulation: Simulation) -> Table:
    names = [one.name.replace("_percent", " %") for one in simulation.outcomes[0].figures]
    figures = tuple(name.replace("_", " ") for name in names)
    rows = tuple((one.policy, *map(_figure, one.figures)) for one in simulation.outcomes)
    return Table(heads=("policy", *figures), rows=rows, numeric=figures)


def _figure(one: Figure) -> str:
    mean = f"{one.mean:.2f}" if one.name.endswith("_percent") else _short(one.mean)
    if one.low is None or one.high is None or one.low == one.high:
        return mean
    return f"{mean} ±{one.high - one.mean:.2f}"


def _short(value: float) -> str:
    return f"{value:.0f}" if value == int(value) else f"{value:.2f}"


def _notes(simulation: Simulation) -> str:
    """What ± means, and the bound."""
    bound = simulation.bound
    said = ["±: 95 % interval of the mean over the orders."] * (simulation.orders > 1)
    if bound is not None:
        refused = bound.name.startswith("refused")
        verb = "refuses less" if refused else "allocates more"
        said.append(
            f"No policy {verb} than {bound.mean:.2f} % (a linear program that knows all arrivals)."
        )
    return " ".join(said)


def simulation_page(simulation: Simulation) -> Doc:
    """The same with the curves of the first order."""
    about = f"{plural(simulation.orders, 'order')}; no VM ran. {_notes(simulation)}"
    title = f"Simulated: {simulation.what}"
    return Doc(title, (_table(simulation), Gallery(tuple(_chart(simulation)), "wide")), about)


def _chart(simulation: Simulation) -> Iterator[Picture]:
    """The curves of the first order; each value holds until the next."""
    curves = [(one.policy, one.curve) for one in simulation.outcomes if len(one.curve) > 1]
    if not curves:
        return
    x_name, y_name = simulation.curve_of
    right = max(x for _, curve in curves for x, _ in curve) or 1.0
    top = max(y for _, curve in curves for _, y in curve) or 1.0
    across = Scale(0.0, right, _LEFT, _WIDTH - 10)
    up = Scale(0.0, top, _HEIGHT, _TOP)
    canvas = SvgCanvas.chart(f"{y_name} over {x_name}, a curve for each policy", _WIDTH)
    for y in _steps(top):
        canvas.line((across.start, up.at(y)), (across.end, up.at(y)), classes="grid")
        canvas.text(_LEFT - 6, up.at(y) + 4, f"{y:g}", 10, "dim", anchor="end")
    for x in _steps(right):
        canvas.text(across.at(x), _HEIGHT + 16, f"{x:g}", 10, "dim", anchor="middle")
    canvas.text(_WIDTH / 2, _HEIGHT + 32, x_name, 11, "dim", anchor="middle")
    canvas.text(0, 10, f"{y_name}, first order", 11, "dim")
    for number, (name, curve) in enumerate(curves):
        series = number % len(SERIES)
        classes = f"curve l{series} dash{series}"
        corners = [(across.at(x), up.at(y)) for x, y in _stairs(_thinned(curve))]
        canvas.line(*corners, classes=classes, title=name)
        left, row = _LEFT + number % 4 * 170, _HEIGHT + 52 + number // 4 * 18
        canvas.line((left, row - 4), (left + 24, row - 4), classes=classes)
        canvas.text(left + 30, row, name, 11)
    svg = canvas.svg(_HEIGHT + 60 + (len(curves) - 1) // 4 * 18)
    yield Picture(f"{y_name} over {x_name}", svg)


def _thinned(
    curve: Sequence[tuple[float, float]], most: int = 400
) -> Sequence[tuple[float, float]]:
    return curve[:: max(1, len(curve) // most)]


def _stairs(curve: Sequence[tuple[float, float]]) -> Iterator[tuple[float, float]]:
    """
    >>> list(_stairs([(0, 1), (2, 5)]))
    [(0, 1), (2, 1), (2, 5)]
    """
    last: float | None = None
    for x, y in curve:
        if last is not None:
            yield x, last
        yield x, y
        last = y


def _steps(most: float) -> list[float]:
    """Round figures from 0 to at most this, four to eleven of them.

    >>> _steps(19.4), _steps(1.0)
    ([0.0, 5.0, 10.0, 15.0], [0.0, 0.2, 0.4, 0.6, 0.8, 1.0])
    """
    ten = 10.0 ** math.floor(math.log10(most))
    step = next(part * ten for part in (0.1, 0.2, 0.5, 1.0, 2.0, 5.0) if most / (part * ten) <= 6)
    return [round(number * step, 9) for number in range(int(most / step + 1e-9) + 1)]
