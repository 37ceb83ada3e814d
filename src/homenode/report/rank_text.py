"""RankText: the hosts that could take a VM, the best first."""

from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.text import Text

from homenode.plan.rank import RankedHost
from homenode.plan.words.explanation import nodes_text
from homenode.report.terminal_text import AsciiWhereNeeded
from homenode.wording import printable


def rank_text(ranking: Sequence[RankedHost]) -> RenderableType:
    """One paragraph a host: where the VM would lie there, or why it cannot."""
    parts: list[RenderableType] = [Text("Hosts, the best first", style="bold underline")]
    for number, ranked in enumerate(ranking, start=1):
        parts.append(
            Padding(
                Text.assemble(
                    f"{number}. ", (printable(ranked.host.name), "bold"), f": {_outcome(ranked)}"
                ),
                (0, 0, 0, 2),
                expand=False,
            )
        )
    return AsciiWhereNeeded(Group(*parts, Text("")))


def _outcome(ranked: RankedHost) -> str:
    if ranked.placement is None:
        return "no placement" if ranked.refusal is None else printable(ranked.refusal.message)
    return f"{nodes_text(ranked.placement.nodes)}; {ranked.placement.fallback}"
