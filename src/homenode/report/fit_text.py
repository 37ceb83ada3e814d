"""FitText: what each Topology Manager policy, or each node of a pool, answers to a pod."""

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from homenode.cpuset import CpuSet
from homenode.pods.fit import Fit, given_text
from homenode.pods.pool_fit import PoolFit, names
from homenode.report.terminal_text import AsciiWhereNeeded, TableOrList
from homenode.wording import printable, pus_text


def fit_text(found: Fit) -> RenderableType:
    """A row for each policy; the node's own is marked."""
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.add_column("topologyManagerPolicy", no_wrap=True)
    table.add_column("answer", overflow="fold")
    for answer in found.answers:
        is_own = answer.policy == found.policy
        name = f"{answer.policy} (set)" if is_own else answer.policy
        text = given_text(answer.admission, found.node, lambda cpus: pus_text(CpuSet(cpus)))
        style = "red" if answer.admission.refusal is not None else ""
        table.add_row(Text(name, "bold" if is_own else ""), Text(printable(text), style))
    return AsciiWhereNeeded(Group(table))


def pool_fit_text(found: PoolFit) -> RenderableType:
    """A row for each answer, with the nodes that give it."""
    rows = [
        (group.answer, f"{len(group.nodes)} of {len(found.fits)}", printable(names(group.nodes)))
        for group in found.groups
    ]
    table = TableOrList(("answer", "nodes", "which"), rows, wraps_last=True)
    return AsciiWhereNeeded(table)
