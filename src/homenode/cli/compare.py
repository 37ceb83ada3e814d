"""homenode compare: effects with intervals between layouts, or "cannot tell". [I/O]"""

from homenode.cli.arguments.conclude import CompareArguments
from homenode.cli.terminal import console, print_json


def compare(asked: CompareArguments) -> None:
    """Print each metric's effect."""
    from homenode.analyse.alternative import alternatives_of
    from homenode.analyse.compare import compare as compare_alternatives
    from homenode.evidence.sources import load_sources

    named = load_sources(asked.runs if asked.bare is None else [asked.bare, *asked.runs])
    chosen = alternatives_of(
        [(one.argument, one.runs) for one in named], first_alone=asked.bare is not None
    )
    skipped = [reason for one in named for reason in one.skipped]
    comparison = compare_alternatives(
        chosen, asked.objective, bare=asked.bare is not None, skipped=skipped
    )
    if asked.json:
        from homenode.formats import encode

        print_json(encode("comparison", comparison))
    else:
        from homenode.report.results_text import comparison_text

        console().print(comparison_text(comparison, everything=asked.everything))
