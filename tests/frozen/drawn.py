"""Drawn answers: every value of the plans for small hosts, and of what results lead to."""

import random
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec
from msgspec.structs import replace

from homenode.bdf import Bdf
from homenode.decide.alternative import alternatives
from homenode.decide.compare import alternatives_by_machine, compare_machines
from homenode.decide.matrices import localities, matrices_of
from homenode.decide.recommendation import decide_for_machines
from homenode.decide.sentences import effect_text, first_line, ground_of, sentence_of
from homenode.decide.switch_effects import file_effects, switch_effects
from homenode.errors import HomenodeError
from homenode.measure.results.model import (
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
from homenode.objective import Objective
from homenode.plan.planner import plan
from homenode.vm.layout import PRESETS, Pinning
from homenode.vm.plan import Unplannable
from homenode.vm.plan_options import EmulatorPolicy, MemoryMode, PciGranularity
from tests.plan import test_against_brute_force as hosts
from tests.small_hosts import asking


def values_text(value: object) -> str:
    """Every value of a record: numbers, names, and of sentences words with a digit or hyphen."""
    return " ".join(_words(value))


def _words(value: Any) -> Iterator[str]:
    match value:
        case msgspec.Struct():  # what is not there is omitted, so that a new field changes nothing
            fields = {name: getattr(value, name) for name in value.__struct_fields__}
            yield from _words({n: v for n, v in fields.items() if v not in (None, (), "", {})})
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
            yield from re.findall(r"\S*[\d-]\S*", value)
        case _:
            yield str(value)


FAMILIES = (
    *((hosts.small_host, hosts.small_wish),) * 3,
    (hosts.crowded_host, hosts.crowded_wish),
    (hosts.paired_host, hosts.paired_wish),
    (hosts.celled_host, hosts.celled_wish),
    (hosts.chiplet_host, hosts.chiplet_wish),
)


def planned(number: int) -> str:
    """The plan for a small host with what QEMU's threads, buses and memory may be asked for."""
    draw = random.Random(number)
    host_of_draw, wish_of_draw = FAMILIES[number % len(FAMILIES)]
    host = host_of_draw(draw)
    wish = wish_of_draw(draw, host)
    layout = wish.layout
    if draw.random() < 0.1:
        layout = replace(layout, name="custom", pinning=Pinning.NODE)
    request = asking(
        wish,
        guest=replace(wish.guest, iothread_ids=tuple(range(1, 1 + draw.choice((0, 0, 1, 3))))),
        layout=layout,
        emulator_policy=draw.choice((*(EmulatorPolicy.AUTO,) * 4, *EmulatorPolicy)),
        housekeeping_pus=hosts.some_pus(draw, len(host.pus), draw.choice((0, 0, 2))),
        pci_granularity=draw.choice((None, *PciGranularity)),
        spare_ports=draw.choice((0, 0, 1, 3)),
        memory_mode=draw.choice(tuple(MemoryMode)),
        mixed_kinds=draw.random() < 0.3,
    )
    try:
        answer = plan(host, request)
    except Unplannable as error:
        return values_text([error.message, error.hint, error.rejections])
    except HomenodeError as error:
        return values_text([str(error.exit_code), error.message, error.hint])
    return values_text(replace(answer, host_fingerprint=""))


GPUS = tuple(Bdf(0, 16 + number, 0, 0) for number in range(4))
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
        for number, gpu in enumerate(GPUS):
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
        states = alike.choice(((None,), (None,), (None,), ("27 ns",), ("27 ns", "61 ns")))
        unit, typical, variants = _FIGURES[metric]
        level = typical * draw.choice((0.02, 0.5, 0.9, 0.97, 1.0, 1.0, 1.0, 1.1, 2.0))
        variant, slow = alike.choice(variants), draw.choice((1.0, 1.0, 1.0, 0.5))
        zero = draw.random() < 0.05
        for place in _places(alike, metric):
            size = place.get("size_bytes", 1 << 40)
            share = slow if place.get("device", place.get("index")) in (GPUS[1], 1) else 1.0
            for boot in range(boots):
                centre = level * share * draw.gauss(1, between) * size / (size + 2**20)
                state = draw.choice(states)
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
    metrics = draw.sample(sorted(_FIGURES), draw.randint(1, 4))
    boots = draw.choice((1, 2, 3, 3, 4, 5))
    hosts_of_runs = draw.choice((("a" * 64,), ("a" * 64,), (None,), ("a" * 64, "b" * 64)))
    layouts = draw.sample(sorted(PRESETS), draw.randint(2, 4))
    has_order, odd = draw.choice(("place", "time", "block", "", "")), draw.random() < 0.3
    kind, shape = draw.choice((None, "kind")), draw.getrandbits(32)
    runs = []
    for number, (layout, host) in enumerate((one, h) for one in layouts for h in hosts_of_runs):
        own = [metric for metric in metrics if draw.random() < 0.9] or metrics
        count = max(1, boots - draw.choice((0, 0, 0, 1)))
        head = RunHead(
            layout,
            "made",
            draw.choice((Origin.MEASURED, Origin.IMPORTED)) if odd else Origin.MEASURED,
            draw.choice((*(Vantage.GUEST,) * 5, Vantage.HOST)) if odd else Vantage.GUEST,
            Switches.of_layout(PRESETS[layout]),
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
            source=f"source {number}",
            started_s=draw.choice((1e9, 1e9 + 100)) + number if has_order == "time" else None,
            of_files=odd,
            place=draw.randint(0, 9) if has_order == "place" else None,
            experiment="trial" if has_order == "block" else None,
            block=draw.randint(0, 2) if has_order == "block" else None,
            hardware=draw.choice(((), ("NVIDIA H200",), ("NVIDIA L40S", "AMD EPYC 9654"))),
        )
        runs.append(Run(head, tuple(_samples(draw, own, count, shape))))
    return runs


def decided(number: int) -> str:
    """What the results of some layouts lead to: effects, answers, sentences."""
    runs = drawn_runs(random.Random(number))
    answers = decide_for_machines(runs, tuple(Objective))
    said = [first_line("made", answers)]
    for answer in answers:
        said += [sentence_of(answer), ground_of(answer), effect_text(answer)]
    chosen = alternatives(runs)
    effects = switch_effects("made", chosen), file_effects(chosen)
    near = localities(chosen, dict(zip(GPUS, (0, 0, 1, 1), strict=True)))
    values: list[object] = [answers, said, *effects, near, *map(matrices_of, chosen)]
    try:
        values.append(compare_machines(alternatives_by_machine([("made", runs)])))
    except HomenodeError as error:
        values.append(error.message)
    return " ".join(map(values_text, values))
