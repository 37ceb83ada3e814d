"""Choosing: which alternatives the arguments of a comparison mean."""

from collections.abc import Sequence
from dataclasses import replace

from homenode.analyse.alternative import Alternative, alternatives, with_joint_states
from homenode.results.model import Run


def alternatives_of(
    arguments: Sequence[tuple[str, Sequence[Run]]], *, first_alone: bool = False
) -> tuple[Alternative, ...]:
    """The alternatives of these runs, {argument: runs}, in the order in which they come.

    Runs of one choice are combined wherever they lie. Where all are of one choice, each
    argument is an alternative of its own: the same layout on two days. first_alone: the first
    argument is not taken together with others (bare metal).
    """
    if first_alone and arguments:
        (argument, runs), *rest = arguments
        alone = [replace(one, label=f"{argument}: {one.label}") for one in alternatives(runs)]
        return with_joint_states((*alone, *alternatives_of(rest)))
    found = alternatives(run for _, runs in arguments for run in runs)
    if len(found) > 1 or len(arguments) < 2:
        return found
    return with_joint_states(
        [replace(one, label=argument) for argument, runs in arguments for one in alternatives(runs)]
    )
