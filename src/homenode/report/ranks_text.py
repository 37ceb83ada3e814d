"""RanksText: which GPUs, cores and node each rank gets, as a table."""

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from homenode.report.terminal_text import AsciiWhereNeeded
from homenode.slurm.ranks import Binding, Rank
from homenode.topology import Host
from homenode.wording import nodes_text, number_list, printable


def ranks_text(binding: Binding, host: Host) -> RenderableType:
    """A line for each rank; the last column says what counting GPUs off would give instead."""
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.add_column(Text("rank"), justify="right")
    for heading in ("GPU", "address", "node", "distance", "PUs", "counted off"):
        # An address that is cut in two cannot be searched for, nor copied.
        whole = len("0000:19:00.0") if heading == "address" else None
        table.add_column(Text(heading), overflow="fold", min_width=whole)
    for rank in binding.ranks:
        naive = "the same" if rank.naive is None else f"{nodes_text(rank.naive)}: wrong"
        cells = (
            str(rank.rank),
            number_list(gpu.index for gpu in rank.gpus),
            ", ".join(str(gpu.bdf) for gpu in rank.gpus),
            number_list(rank.nodes),
            _distance(rank, host),
            str(rank.pus),
            naive,
        )
        style = "" if rank.naive is None else "yellow"
        table.add_row(*(Text(printable(cell)) for cell in cells), style=style)
    title = Text(printable(f"Ranks of a node like {host.name}"), style="bold underline")
    return AsciiWhereNeeded(Group(title, table))


def _distance(rank: Rank, host: Host) -> str:
    """SLIT distance from the rank's nodes to its GPUs' nodes, the worst of them."""
    known = [
        distance
        for gpu in rank.gpus
        if gpu.node is not None
        for distance in [min(host.distance(node, gpu.node) or 0 for node in rank.nodes)]
        if distance
    ]
    return str(max(known)) if known else "unknown"
