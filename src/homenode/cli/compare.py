"""homenode compare: effects with intervals between layouts, or "cannot tell". [I/O]"""

from homenode.cli.arguments.conclude import CompareArguments
from homenode.cli.terminal import console, print_json
from homenode.decide.alternative import alternatives_of
from homenode.decide.compare import compare as compare_alternatives
from homenode.decide.evidence.sources import load_sources
from homenode.formats import encode
from homenode.show.results_text import comparison_text


def compare(asked: CompareArguments) -> None:
    """Print each metric's effect."""
    named = load_sources(asked.runs if asked.bare is None else [asked.bare, *asked.runs])
    chosen = alternatives_of(
        [(one.argument, one.runs) for one in named], first_alone=asked.bare is not None
    )
    skipped = [reason for one in named for reason in one.skipped]
    comparison = compare_alternatives(
        chosen, asked.objective, bare=asked.bare is not None, skipped=skipped
    )
    if asked.json:
        print_json(encode("comparison", comparison))
    else:
        console().print(comparison_text(comparison, everything=asked.everything))
