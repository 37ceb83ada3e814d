"""What is computed, and not measured, is part of the evidence, and weaker than every figure."""

import random
from collections.abc import Sequence

import pytest
from msgspec.structs import replace

from homenode.decide.comparison import EvidenceLevel
from homenode.decide.decide import decide
from homenode.decide.evidence.documents import publications
from homenode.decide.evidence.model import Derivation, Evidence, Publication
from homenode.decide.evidence.parse import parse_publications
from homenode.decide.machine_facts import facts_of_host
from homenode.decide.verdict import ReasonId, Verdict
from homenode.errors import InputError
from homenode.measure.results.model import Run
from homenode.objective import Objective
from homenode.vm.fingerprint import host_fingerprint
from homenode.vm.sources import load_host
from tests.simulated_runs import simulated_run

HOST = load_host("hgx-h100")
METRIC = "allreduce-busbw-peak"


def with_derivations(derivations: Sequence[Derivation]) -> tuple[Publication, ...]:
    return tuple(
        replace(one, derivations=tuple(derivations) if one.derivations else ())
        for one in publications()
    )


def order(favours: str, over: str) -> Derivation:
    return Derivation(
        id="x",
        objective=Objective.COLLECTIVE,
        favours=favours,
        over=over,
        text="a reason",
        method="a method",
    )


def decided(found: tuple[Publication, ...], runs: Sequence[Run] = ()) -> Verdict:
    machine = facts_of_host(HOST, found)
    return decide(Evidence(found, tuple(runs)), machine, Objective.COLLECTIVE)


def measured(layout: str, value: float) -> Run:
    rng = random.Random(layout)
    of = {METRIC: ("bytes_per_s", value)}
    return simulated_run(layout, of, rng, between=0.001, within=0.001, host=host_fingerprint(HOST))


def test_a_machine_without_figures_gets_what_is_computed_as_reasoned() -> None:
    made = decided(publications())
    assert (made.choice, made.level) == ("pin", EvidenceLevel.REASONED)
    computed = {one.alternative for one in made.reasons if one.id is ReasonId.COMPUTED}
    assert computed == {"pin", "pin-numa-pci"} and made.measure_next == "pin-numa-pci"


def test_another_derivation_makes_another_reasoned_answer() -> None:
    made = decided(with_derivations([order("pin-numa-pci", "pin")]))
    assert (made.layout, made.level) == ("pin-numa-pci", EvidenceLevel.REASONED)
    assert made.why(ReasonId.PRIOR) is None


def test_derivations_that_contradict_each_other_end() -> None:
    made = decided(with_derivations([order("pin-numa", "pin"), order("pin", "pin-numa")]))
    assert made.level is EvidenceLevel.REASONED


def test_no_derivation_overrules_a_figure() -> None:
    runs = [measured("pin", 20e9), measured("pin-numa", 8e9)]
    made = decided(with_derivations([order("pin-numa", "pin")]), runs)
    assert (made.choice, made.level) == ("pin", EvidenceLevel.MEASURED)
    # Both have figures: nothing that is computed of them is worth a word.
    assert made.why(ReasonId.COMPUTED) is None


@pytest.mark.parametrize("host", ["rtx4080-i9-14900k", "epyc9654-2p-1node"])
def test_one_gpu_or_one_node_has_nothing_to_compute(host: str) -> None:
    machine = facts_of_host(load_host(host), publications())
    made = decide(Evidence(publications()), machine, Objective.COLLECTIVE)
    assert made.why(ReasonId.COMPUTED) is None


def test_a_derivation_names_layouts_that_there_are() -> None:
    text = """
format = 4
id = "x"
title = "x"
publisher = "x"
published = "2026"
[[derivation]]
id = "a"
objective = "collective"
favours = "no-such-layout"
over = "pin"
text = "t"
method = "m"
"""
    with pytest.raises(InputError, match="no-such-layout"):
        parse_publications({"x.toml": text})
