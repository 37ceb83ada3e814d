"""Drawn answers: every value of the plans for small hosts, and of what results lead to."""

import random
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec
from msgspec.structs import replace

from homenode.bdf import Bdf
from homenode.cpuset import CpuSet, PackageIndex
from homenode.decide.alternative import group_runs
from homenode.decide.compare import compare_machines, group_alternatives
from homenode.decide.machine_facts import MachineFacts, collect_run_facts
from homenode.decide.matrices import build_matrices, compare_localities
from homenode.decide.recommendation import decide_all, decide_for_machines
from homenode.decide.sentences import (
    format_answer,
    format_basis,
    format_effect,
    format_review,
    format_sentence,
    stop_text,
)
from homenode.decide.switch_effects import answer_of, conclude, file_effects, switch_effects
from homenode.errors import HomenodeError
from homenode.findings import Caveat, Finding
from homenode.machine.topology import CoreId, DomainMark, Host, RunningDomain
from homenode.measure.results.model import (
    MOVING,
    Condition,
    GpuPlace,
    Origin,
    Run,
    RunHead,
    Sample,
    Statistic,
    Switches,
)
from homenode.measure.results.vantage import Vantage
from homenode.measure.trial.journal import TrialHead
from homenode.objective import Objective
from homenode.plan.planner import LayoutInputs, plan
from homenode.plan.stored import domain_of_plan
from homenode.units import GIB, MIB
from homenode.vm.layout import PRESETS, GuestCells, Pinning
from homenode.vm.model import GuestTopology, MemoryDevice, Vm
from homenode.vm.plan import Unplannable
from homenode.vm.plan_options import EmulatorPolicy, MemoryMode, PciGranularity, make_cell
from tests.plan import test_against_brute_force as hosts
from tests.small_hosts import asking, floating_domain, pinned_domain

_TEXTS = frozenset({"cause", "command", "cost", "fix", "source"})
"""Fields that say in words what follows from the id of a finding or caveat."""


def values_text(value: object) -> str:
    """Every value of a record: numbers, names, and of sentences the numbers."""
    return " ".join(_words(value))


def _words(value: Any) -> Iterator[str]:
    match value:
        case msgspec.Struct():  # what is not there is omitted, so that a new field changes nothing
            fields = {name: getattr(value, name) for name in value.__struct_fields__}
            omitted = _TEXTS if isinstance(value, Finding | Caveat) else frozenset()
            kept = {n: v for n, v in fields.items() if v not in (None, (), "", {})}
            yield from _words({name: kept[name] for name in kept if name not in omitted})
        case Mapping():
            for item in value.items():
                yield from map(values_text, item)
        case list() | tuple():
            yield "["
            for part in value:
                yield from _words(part)
            yield "]"
        case frozenset():
            yield from sorted(map(values_text, value))
        case float():
            yield f"{value:.4g}"
        case str() if " " in value:
            yield from re.findall(r"\S*\d\S*", value)
        case _:
            yield str(value)


FAMILIES = (
    *((hosts.small_host, hosts.small_wish),) * 3,
    (hosts.crowded_host, hosts.crowded_wish),
    (hosts.paired_host, hosts.paired_wish),
    (hosts.celled_host, hosts.celled_wish),
    (hosts.chiplet_host, hosts.chiplet_wish),
)


def _more_domains(draw: random.Random, host: Host) -> Iterator[RunningDomain]:
    """The VM that is planned as it runs, one that floats over a range, and a copy, sometimes."""
    size, nodes = draw.choice((1, 2)) * GIB, [node.index for node in host.nodes if node.pus]
    if draw.random() < 0.2:
        bound = ((draw.choice(nodes), size),)
        page_bytes = draw.choice((None, 2 * MIB))
        yield pinned_domain(
            "0", name="vm", memory_bytes=size, memory_by_node=bound, page_bytes=page_bytes
        )
    if draw.random() < 0.2:
        floating = floating_domain(draw.randint(1, 2), name="range", memory_bytes=size)
        pus = CpuSet(range(len(host.pus) // 2))
        yield replace(floating, vcpu_pins=(pus,) * len(floating.vcpu_pins), emulator_pus=pus)
    if draw.random() < 0.1:
        copy = pinned_domain("1", name="copy", running=False, memory_bytes=size)
        yield replace(copy, mark=draw.choice((DomainMark.OWN, DomainMark.COPY)))


def _more_of_guest(draw: random.Random, guest: Vm) -> Vm:
    devices = [
        MemoryDevice(cell=0, size_bytes=size, plugged_bytes=size)
        for size in draw.choice(((), (), (), (GIB,), (GIB, GIB // 2)))
    ]
    topologies = (1, 1, guest.vcpus, 1), (guest.vcpus, 1, 1, 1)
    shown = [None, *(GuestTopology(*topology) for topology in topologies)]
    return replace(
        guest,
        iothread_ids=tuple(range(1, 1 + draw.choice((0, 0, 1, 3)))),
        memory_devices=tuple(devices),
        has_dimms=bool(devices),
        cpu_topology=guest.cpu_topology or draw.choice(shown),
        has_iommu=draw.random() < 0.2,
    )


def planned(number: int) -> str:
    """The plan for a small host with what QEMU's threads, buses and memory may be asked for."""
    draw = random.Random(number)
    host_of_draw, wish_of_draw = FAMILIES[number % len(FAMILIES)]
    host = host_of_draw(draw)
    wish = wish_of_draw(draw, host)
    host = replace(host, domains=(*host.domains, *_more_domains(draw, host)))
    if draw.random() < 0.1:  # nodes that span packages
        halves = (
            replace(core, id=CoreId(PackageIndex(i % 2), i)) for i, core in enumerate(host.cores)
        )
        host = replace(host, cores=tuple(halves))
    if draw.random() < 0.1:
        host = replace(host, nodes=tuple(replace(node, package=None) for node in host.nodes))
    bare = [node.index for node in host.nodes if not node.pus]
    layout = wish.layout
    if draw.random() < 0.2:
        layout = replace(layout, name="custom", pinning=Pinning.NODE)
    request = asking(
        wish,
        guest=_more_of_guest(draw, wish.guest),
        layout=layout,
        page_bytes=draw.choice((wish.page_bytes, wish.page_bytes, 2 * MIB)),
        emulator_policy=draw.choice((*(EmulatorPolicy.AUTO,) * 4, *EmulatorPolicy)),
        housekeeping_pus=hosts.some_pus(draw, len(host.pus), draw.choice((0, 0, 2))),
        pci_granularity=draw.choice((None, *PciGranularity)),
        spare_ports=draw.choice((0, 0, 1, 3)),
        memory_mode=draw.choice(tuple(MemoryMode)),
        mixed_kinds=draw.random() < 0.3,
        memory_nodes_allowed=tuple(bare) if draw.random() < 0.2 else (),
    )
    if layout.cells is GuestCells.HOST and draw.random() < 0.15:
        sizes = [draw.randint(1, 3) for _ in range(draw.randint(1, 3))]
        cells = [make_cell(size, GIB, draw.choice((None, None, 0))) for size in sizes]
        request = asking(
            request, vcpus=sum(sizes), memory_bytes=len(cells) * GIB, explicit_cells=tuple(cells)
        )
    try:
        answer = plan(host, request)
    except Unplannable as error:
        return values_text([error.message, error.hint, error.rejections])
    except HomenodeError as error:
        return values_text([str(error.exit_code), error.message, error.hint])
    return values_text([replace(answer, host_fingerprint=""), domain_of_plan(answer)])


GPUS = tuple(Bdf(0, 16 + number, 0, 0) for number in range(5))
_FIGURES = {
    "memory-bandwidth": ("bytes_per_s", 1e11, ("triad", "triad", None)),
    "memory-latency": ("ns", 100.0, ("dram", "dram", "CPU 3")),
    "cpu-throughput": ("events_per_s", 1e5, (None,)),
    "allreduce-busbw-peak": ("bytes_per_s", 2e10, (None, None, "topology file")),
    "allreduce-busbw": ("bytes_per_s", 2e10, (None,)),
    "h2d-bandwidth": ("bytes_per_s", 2e10, (None,)),
    "d2h-bandwidth": ("bytes_per_s", 2e10, (None,)),
    "p2p-bandwidth": ("bytes_per_s", 2e10, (None,)),
    "gpu-power": ("watts", 300.0, ("nccl", "gpu-bandwidth")),
    "core-to-core-latency": ("ns", 40.0, (None,)),
    "app-rate:x": ("units_per_s", 50.0, (None,)),
}
_CONDITIONS = ("governor", "kernel", "tool nccl", "tool largest message", "guest nodes")


def _places(draw: random.Random, metric: str) -> Iterator[Mapping[str, Any]]:
    """What the samples of a metric are of."""
    if metric.startswith(("h2d", "d2h", "gpu-")):
        named = draw.random() < 0.7
        node = draw.choice((None, None, 0))
        for number, gpu in enumerate(GPUS[: draw.choice((4, 5))]):
            yield {"device": gpu, "node": node} if named else {"index": number, "node": node}
    elif metric.startswith("p2p"):
        yield from ({"device": a, "peer": b} for a in GPUS[:3] for b in GPUS[:3] if a != b)
    elif metric == "allreduce-busbw":
        yield from ({"size_bytes": 1 << power} for power in range(10, 31, 2))
    elif draw.random() < 0.15:
        yield from ({"node": node} for node in (0, 1))
    else:
        yield {}


def _samples(
    draw: random.Random, metrics: Sequence[str], boots: int, shape: int
) -> Iterator[Sample]:
    """shape: seed of what is mostly alike in all runs."""
    statistic = draw.choice((*(Statistic.SAMPLE,) * 8, Statistic.MEAN, Statistic.LOW))
    between, within = draw.choice((0.002, 0.01, 0.05)), draw.choice((0.002, 0.02))
    repeats = draw.choice((1, 3, 5))
    for metric in metrics:
        alike = random.Random(f"{shape} {metric}") if draw.random() < 0.93 else draw
        latencies = alike.choice(((), (), (), (27,), (27, 61)))
        states: list[str | None] = [f"{ns + draw.choice((0, 0, 1))} ns" for ns in latencies]
        if states and draw.random() < 0.2:
            states = [MOVING]
        unit, typical, variants = _FIGURES[metric]
        level = typical * draw.choice((0.02, 0.5, 0.9, 0.97, 1.0, 1.0, 1.0, 1.1, 2.0))
        variant, slow = alike.choice(variants), draw.choice((1.0, 1.0, 1.0, 0.5))
        zero = draw.random() < 0.05
        for place in _places(alike, metric):
            size = place.get("size_bytes", 1 << 40)
            share = slow if place.get("device", place.get("index")) in (GPUS[1], 1) else 1.0
            for boot in range(boots):
                centre = level * share * draw.gauss(1, between) * size / (size + 2**20)
                state = draw.choice(states or [None])
                for number in range(repeats):
                    yield Sample(
                        metric,
                        unit,
                        0.0 if zero else centre * draw.gauss(1, within),
                        boot=boot,
                        number=number,
                        variant=variant,
                        state=state,
                        statistic=statistic,
                        disturbed=draw.random() < 0.1,
                        **place,
                    )


def drawn_runs(draw: random.Random) -> list[Run]:
    """Runs of some layouts, on one machine or two, of which something may be odd."""
    metrics = draw.sample(sorted(_FIGURES), draw.randint(1, 3))
    boots = draw.choice((1, 2, 3, 3, 4, 5))
    hosts_of_runs = draw.choice((("a" * 64,), ("a" * 64,), (None,), ("a" * 64, "b" * 64)))
    layouts = draw.sample(sorted(PRESETS), draw.randint(2, 4))
    has_order, odd = draw.choice(("place", "time", "block", "", "")), draw.random() < 0.3
    kind, shape = draw.choice((None, "kind")), draw.getrandbits(32)
    system = draw.choice(("made", "made", "cpu-only"))
    runs = []
    times = draw.choice((1, 1, 2))
    pairs = [(layout, host) for layout in layouts * times for host in hosts_of_runs]
    for number, (layout, host) in enumerate(pairs):
        if len(hosts_of_runs) > 1 and draw.random() < 0.2:
            continue
        own = [metric for metric in metrics if draw.random() < 0.9] or metrics
        count = max(1, boots - draw.choice((0, 0, 0, 1)))
        head = RunHead(
            f"{layout} {number}",
            system,
            draw.choice((Origin.MEASURED, Origin.IMPORTED)) if odd else Origin.MEASURED,
            draw.choice((*(Vantage.GUEST,) * 5, Vantage.HOST)) if odd else Vantage.GUEST,
            Switches.from_layout(PRESETS[layout]),
            host_kind=kind,
            host=host,
            arrangement=draw.choice((None, None, None, "local")) if odd else None,
            memory_mode=draw.choice((None, "strict", "interleave")) if odd else None,
            page_bytes=draw.choice((None, 4096, 2 << 20)) if odd else None,
            vcpus=draw.choice((8, 8, 16)) if odd else 8,
            boots=tuple(f"{layout}{boot}" for boot in range(count)) if draw.random() < 0.3 else (),
            gpus=tuple(GpuPlace(gpu, draw.choice((None, 0))) for gpu in GPUS) if odd else (),
            host_addresses=draw.random() < 0.7,
            conditions=tuple(
                Condition(name, draw.choice(("x", "x", "x", "y")) if odd else "x")
                for name in _CONDITIONS
                if draw.random() < 0.7
            ),
            unusable=("marked",) if odd and draw.random() < 0.1 else (),
            source=draw.choice((None, "source 1", "source 2")),
            started_s=draw.choice((1e9, 1e9 + 100)) + number if has_order == "time" else None,
            of_files=odd,
            place=draw.randint(0, 9) if has_order == "place" else None,
            experiment="trial" if has_order == "block" else None,
            block=draw.randint(0, 2) if has_order == "block" else None,
            hardware=draw.choice(((), ("NVIDIA H200",), ("NVIDIA L40S", "AMD EPYC 9654"))),
        )
        runs.append(Run(head, tuple(_samples(draw, own, count, shape))))
    return runs


def _machine(draw: random.Random, runs: Sequence[Run]) -> MachineFacts:
    """A machine whose runs some of these may be."""
    return replace(
        collect_run_facts("made", runs),
        fingerprint="a" * 64,
        kind="kind",
        gpus=draw.choice((None, 0, 1, 4)),
        hardware=draw.choice(((), ("NVIDIA H200",))),
        inputs=LayoutInputs(
            nodes=draw.choice((None, 1, 2)),
            has_siblings=draw.random() < 0.7,
            has_grace=draw.random() < 0.2,
            has_gpus=draw.choice((None, True, False)),
            has_pairs=draw.random() < 0.3,
            expander_buses=draw.random() < 0.8,
            private_memory=draw.random() < 0.1,
        ),
    )


def decided(number: int) -> str:
    """What the results of some layouts lead to: effects, answers, sentences."""
    draw = random.Random(number)
    runs = drawn_runs(draw)
    machine = _machine(draw, runs)
    answers = (
        *decide_for_machines(runs, tuple(Objective)),
        *decide_all(runs, machine),
    )
    chosen = group_runs(runs)
    head = TrialHead(
        "t",
        "qemu:///system",
        "vm",
        "u",
        "vm",
        (),
        3,
        1,
        "/r",
        objective=draw.choice(list(Objective)),
    )
    values: list[object] = [
        answers,
        [format_answer("made", answers), format_review(answers), stop_text(answers)],
        [
            (format_sentence(answer), format_basis(answer), format_effect(answer))
            for answer in answers
        ],
        switch_effects("made", chosen),
        file_effects(chosen),
        compare_localities(chosen, dict(zip(GPUS, (0, 0, 1, 1, 1), strict=True))),
        [build_matrices(alternative) for alternative in chosen],
        answer_of(conclude(runs, "vm", "qemu:///system", ("--yes",), machine), head, 3),
    ]
    try:
        values.append(compare_machines(group_alternatives([("made", runs)])))
    except HomenodeError as error:
        values.append(error.message)
    return " ".join(map(values_text, values))
