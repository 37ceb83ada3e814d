"""MachineFacts: facts of a machine, besides its results, that matter for a recommendation."""

import re
from collections.abc import Iterable, Sequence
from enum import StrEnum

from msgspec import Struct, structs
from msgspec.structs import replace

from homenode.check.doctor.links import link_health
from homenode.decide.comparison import make_caveat
from homenode.findings import Caveat, Finding
from homenode.machine.topology import Host
from homenode.measure.results.model import Run, RunHead, host_kind, list_hardware
from homenode.measure.results.vantage import Vantage
from homenode.plan.planner import LayoutInputs, build_host_inputs
from homenode.text import shorten_list


class MachineFacts(Struct, frozen=True, kw_only=True):
    name: str
    fingerprint: str | None  # as in the head of its runs; None = unknown
    kind: str | None  # as in the head of its runs; None = unknown
    # the directory that its runs name, if they have no host name; None if the machine itself is
    # known
    results: str | None
    inputs: LayoutInputs  # facts that the table of layouts reads
    gpus: int | None
    findings: tuple[Finding, ...]  # about its links
    hardware: tuple[str, ...] = ()  # names of its processor and GPUs

    @property
    def nodes(self) -> int | None:
        """The number of nodes with CPUs; None = unknown."""
        return self.inputs.nodes


def collect_host_facts(host: Host) -> MachineFacts:
    """Return the facts of a machine whose topology is known."""
    gpus = host.whole_gpus
    return MachineFacts(
        name=host.name,
        fingerprint=host.fingerprint,
        kind=host_kind(host),
        results=None,
        inputs=build_host_inputs(host),
        gpus=len(gpus),
        findings=link_health(host),
        hardware=list_hardware(host),
    )


def collect_run_facts(name: str, runs: Sequence[Run]) -> MachineFacts:
    """Return the facts of a machine known only by its runs."""
    head = runs[0].head
    kind = next((run.head.host_kind for run in runs if run.head.host_kind is not None), None)
    return MachineFacts(
        name=name,
        fingerprint=next((run.head.host for run in runs if run.head.host is not None), None),
        kind=kind,
        results=head.system,
        inputs=LayoutInputs(nodes=None, has_siblings=True, has_grace=False),
        gpus=None,
        findings=(),
    )


class MachineMatch(StrEnum):
    """Whether a run without a host name belongs to a host."""

    SHOWN = "shown"  # the name contains models of the host, and no other model
    OTHER = "other"  # the name contains a model that the host does not have
    UNKNOWN = "unknown"  # the name contains no model


def match_machine(head: RunHead, names: Iterable[str]) -> MachineMatch:
    """Match a run with a host by names of processor and GPUs, or its directory's GPU."""
    host = [models for name in names if (models := _parse_models(name))]
    printed_models = [
        models for name in (*head.hardware, head.system) if (models := _parse_models(name))
    ]
    if not host or not printed_models:
        return MachineMatch.UNKNOWN
    is_there = all(any(_are_one(models, part) for part in host) for models in printed_models)
    return MachineMatch.SHOWN if is_there else MachineMatch.OTHER


def assign_runs(runs: Sequence[Run], host: Host) -> tuple[Run, ...]:
    """Assign runs without a host name to this host if their processor or GPUs match. All of them
    are of one machine, or none is assigned."""
    nameless = [run for run in runs if run.head.host is None]
    names = list_hardware(host)
    matching_runs = [r for r in nameless if match_machine(r.head, names) is MachineMatch.SHOWN]
    if len({(run.head.system, run.head.host_kind) for run in matching_runs}) != 1:
        return tuple(runs)
    fingerprint = host.fingerprint
    return tuple(
        Run(structs.replace(run.head, host=fingerprint), run.samples)
        if run in matching_runs
        else run
        for run in runs
    )


def check_unassigned_runs(runs: Sequence[Run], machine: MachineFacts) -> tuple[Caveat, ...]:
    """Return caveats on runs without a host name that are not counted, if the machine is known."""
    if machine.fingerprint is None or machine.nodes is None:
        return ()
    heads: dict[MachineMatch, list[RunHead]] = {}
    for run in runs:
        if run.head.host is None:
            match = match_machine(run.head, machine.hardware)
            heads.setdefault(match, []).append(run.head)
    return tuple(_make_machine_caveat(match, heads[match], machine) for match in heads)


NOT_OF_MACHINE = ("other-machine", "machine-unknown")
"""Caveats on runs that do not count."""

_NAMED_PARTS = 4  # processor and GPU models in a caveat


def _make_machine_caveat(
    match: MachineMatch, heads: Sequence[RunHead], machine: MachineFacts
) -> Caveat:
    hardware = (name for head in heads for name in head.hardware or (head.system,))
    names = shorten_list(dict.fromkeys(hardware), _NAMED_PARTS)
    detail, cause, fix = {
        MachineMatch.OTHER: (
            f"these runs name {names}, which {machine.name} does not have: they do not count here",
            "the runs were measured on another machine",
            "homenode compare without --host compares them on their own machine",
        ),
        MachineMatch.SHOWN: (
            "runs in several directories name this hardware and no host: none counts here",
            "the runs may be of several machines with the same hardware",
            "name the directory of this machine alone, or homenode import --machine",
        ),
        MachineMatch.UNKNOWN: (
            "these runs have no host name and no processor or GPU model, so they do not count here",
            "outputs of most other tools have no host name, and neither has a bench in a guest "
            "without --plan",
            "if they are of this machine: homenode import --machine, or bench --plan",
        ),
    }[match]
    return make_caveat(
        NOT_OF_MACHINE[match is not MachineMatch.OTHER],
        "; ".join(dict.fromkeys(head.system for head in heads)),
        detail,
        blocks=False,
        cause=cause,
        fix=fix,
    )


_WORD = re.compile(r"[a-z0-9]+")
_MODEL = re.compile(r"(?=[a-z]*\d)[a-z0-9]{3,12}")
_NO_MODEL = re.compile(
    r"\d{1,5}(?:gb|gib|mb|w|core|mhz|ghz)|sxm\d?|pcie\d?|gen\d|ddr\d|hbm\d[a-z]?"
)
_VARIANTS = frozenset({"ti", "super", "ada", "pro", "quadro", "titan", "laptop", "nvl"})
_MAX_NAME = 200


def _parse_models(name: str) -> frozenset[str]:
    """Return the words of a name that distinguish a processor or GPU model: words with a digit,
    except sizes and connectors, and variant words; none without a digit.

    >>> sorted(_parse_models("NVIDIA A100-SXM4-80GB") | _parse_models("AMD EPYC 9654 96-Core"))
    ['9654', 'a100']
    """
    words = _WORD.findall(name[:_MAX_NAME].lower())
    numbers = {w for w in words if _MODEL.fullmatch(w) and not _NO_MODEL.fullmatch(w)}
    return frozenset(numbers | (_VARIANTS & set(words))) if numbers else frozenset()


def _are_one(models: frozenset[str], models_of_host: frozenset[str]) -> bool:
    """Return whether two names may be of one model. lspci prints more than the driver: GH100 [H200
    SXM]."""
    has_shared = bool((models & models_of_host) - _VARIANTS)
    return has_shared and models & _VARIANTS == models_of_host & _VARIANTS


_PROCESSOR = re.compile(r"\b(?:xeon|epyc|ryzen|core|opteron|processor|cpu|neoverse)\b", re.I)


def format_other_hardware(first: Iterable[RunHead], second: Iterable[RunHead]) -> str:
    """ "NVIDIA H200 against NVIDIA L40S": processors or GPUs that do not match the other runs'; ""
    if all match. QEMU's own models ("E312xx") are ignored."""
    heads = (tuple(first), tuple(second))
    for is_processor in (True, False):
        sides = [
            {
                name: models
                for head in side
                for name in head.hardware
                if bool(_PROCESSOR.search(name)) is is_processor
                and (models := _parse_models(name))
                and not any("xx" in word for word in models)
            }
            for side in heads
        ]
        pairs = [(a, b) for a in sides[0].values() for b in sides[1].values()]
        if pairs and not any(_are_one(a, b) for a, b in pairs):
            return " against ".join(", ".join(sorted(side)) for side in sides)
    return ""


_SHORT_HASH = 8


def group_runs_by_machine(runs: Sequence[Run]) -> dict[str, list[Run]]:
    """Runs by machine: by their directory's, unless they name several hosts, or kinds of host."""
    by_system: dict[str, list[Run]] = {}
    for run in runs:
        by_system.setdefault(run.head.system, []).append(run)
    machines: dict[str, list[Run]] = {}
    for system, group in by_system.items():
        hosts = {run.head.host for run in group} - {None}
        kinds = {run.head.host_kind for run in group} - {None}
        for run in group:
            name = system
            if len(hosts) > 1 or len(kinds) > 1:
                host = run.head.host[:_SHORT_HASH] if run.head.host else run.head.host_kind
                name = f"{system} on {host or 'a host that is not named'}"
            machines.setdefault(name, []).append(run)
    return machines


def find_machines(runs: Sequence[Run], this_host: Host | None = None) -> tuple[MachineFacts, ...]:
    """Return the machines of runs. this_host: its links count if runs name it."""
    return tuple(
        replace(collect_measured_facts(group, this_host), name=name)
        for name, group in group_runs_by_machine(runs).items()
    )


def collect_measured_facts(runs: Sequence[Run], host: Host | None) -> MachineFacts:
    """Return the facts of the machine of some runs, and of the host if the runs name it."""
    machine = None if host is None else collect_host_facts(host)
    if machine is not None and any(run.head.host == machine.fingerprint for run in runs):
        return machine
    return collect_run_facts(runs[0].head.system, runs)


def select_guest_runs(runs: Sequence[Run]) -> tuple[Run, ...]:
    """Return the runs without those on the host itself, if there are guests: bare metal is not a
    choice."""
    guests = tuple(run for run in runs if run.head.vantage is Vantage.GUEST)
    return guests or tuple(runs)


def select_own_runs(runs: Sequence[Run], machine: MachineFacts) -> tuple[Run, ...]:
    """Return the runs of this machine, or, if it is not named, of the same directory and kind."""
    if machine.fingerprint is not None:
        return tuple(run for run in runs if run.head.host == machine.fingerprint)
    return tuple(
        run
        for run in runs
        if run.head.host is None
        and (run.head.system, run.head.host_kind) == (machine.results, machine.kind)
    )


def select_runs_of_kind(runs: Sequence[Run], machine: MachineFacts) -> dict[str, tuple[Run, ...]]:
    """Return the runs of other machines of its kind, machine by machine: they are never mixed."""
    by_host: dict[str, list[Run]] = {}
    for run in runs:
        head = run.head
        is_own = machine.fingerprint is not None and head.host == machine.fingerprint
        if head.host_kind is None or head.host_kind != machine.kind or is_own:
            continue
        if head.host is not None:
            by_host.setdefault(head.host, []).append(run)
    return {host: select_guest_runs(group) for host, group in by_host.items()}
