"""Conclusion: what a trial's boots notify: effects, a verdict per objective, and what to do."""

import shlex
from collections.abc import Sequence

from msgspec import Struct

from homenode.decide.alternative import alternatives_of
from homenode.decide.compare import compare
from homenode.decide.comparison import Comparison
from homenode.decide.decide import decide_all
from homenode.decide.evidence.model import Evidence, Publication
from homenode.decide.machine_facts import MachineFacts
from homenode.decide.verdict import Verdict, Verdicts
from homenode.measure.results.model import Origin, Run
from homenode.measure.results.vantage import Vantage
from homenode.objective import Objective


class Advice(Struct, frozen=True, kw_only=True):
    """For an objective: the layout to make permanent, and the command."""

    objective: Objective
    layout: str
    command: str


class Conclusion(Struct, frozen=True, kw_only=True):
    """comparison: None where fewer than two layouts were measured. of_bare: each layout against the
    host itself, None where that was not measured. emulated: no figure means anything, and there are
    no verdicts.
    """

    comparison: Comparison | None
    of_bare: Comparison | None
    verdicts: Verdicts
    advice: tuple[Advice, ...]
    emulated: bool

    def of_this_trial(self) -> Verdicts:
        """Verdicts of the objectives that it has figures of."""
        found = tuple(
            one for one in self.verdicts.verdicts if one.here or one.passed or one.stopped
        )
        return Verdicts(found, self.verdicts.skipped)


def conclude(
    runs: Sequence[Run],
    domain: str,
    connect: str,
    apply_words: Sequence[str],
    publications: Sequence[Publication],
    machine: MachineFacts,
    plan_words: Sequence[str] = (),
) -> Conclusion:
    """The conclusion of a trial's runs, in the order of its layouts: the first is the baseline.

    domain: what names it on a command line. apply_words: options that the layouts were planned
    with; plan_words: of `homenode plan` instead, where the user gave the PUs. machine: what they
    were measured on.
    """
    guests = [run for run in runs if run.head.vantage is Vantage.GUEST]
    bare = [run for run in runs if run.head.vantage is not Vantage.GUEST]
    emulated = any(run.head.origin is Origin.EMULATED for run in runs)
    chosen = alternatives_of([("trial", guests)])
    comparison = compare(chosen) if len(chosen) > 1 else None
    of_bare = None
    if bare and guests:
        against = alternatives_of([("bare", bare), ("trial", guests)], first_alone=True)
        of_bare = compare(against, bare=True)
    evidence = Evidence(tuple(publications), tuple(guests))
    found = () if emulated else decide_all(evidence, machine)

    def command(found: Verdict) -> str:
        if not plan_words:
            words = ["homenode", "apply", domain, "--connect", connect, *apply_words]
            return shlex.join([*words, *found.words])
        virsh, output = ["virsh", "-c", connect], f"vm-{found.layout}.xml"
        dump = [*virsh, "dumpxml", "--inactive", domain]
        made = ["homenode", "plan", "vm.xml", *plan_words, *found.words, "-o", output]
        return " && ".join(
            (
                f"{shlex.join(dump)} > vm.xml",
                shlex.join(made),
                shlex.join([*virsh, "define", output]),
            )
        )

    advice = tuple(
        Advice(objective=one.objective, layout=one.layout, command=command(one))
        for one in found
        if one.here and one.layout is not None
    )
    return Conclusion(
        comparison=comparison,
        of_bare=of_bare,
        verdicts=Verdicts(found, ()),
        advice=advice,
        emulated=emulated,
    )
