"""Machine: everything that a report says of one machine, and of no other.

Only what was measured on the same hardware is compared: runs are distinguished by their system and
by the host that they name.
"""

import gc
from collections.abc import Iterable, Mapping, Sequence

from msgspec import Struct, structs
from msgspec.structs import replace

from homenode.decide.alternative import Alternative, alternatives
from homenode.decide.compare import compare_series
from homenode.decide.comparison import Comparison, Doubt, EvidenceLevel, once
from homenode.decide.decide import decide_all
from homenode.decide.doubts import doubts_of
from homenode.decide.evidence.model import Evidence, Publication, System
from homenode.decide.grade import Graded, grade_of
from homenode.decide.machine_facts import MachineFacts, facts_of_host, facts_of_runs, of_host
from homenode.decide.summary import Series, SeriesKey
from homenode.decide.switch_effects import SwitchEffect, switch_effects
from homenode.decide.verdict import Verdict
from homenode.machine.topology import Host
from homenode.measure.results.model import UNKNOWN_SWITCHES, Origin, Run
from homenode.measure.results.vantage import Vantage
from homenode.vm.layout import PRESETS
from homenode.vm.plan_model import Plan

ANY_LAYOUT = "any layout"
"""Label of figures that a source prints for all layouts alike."""

BARE = "bare metal"
"""Label of runs on the host itself in addition to those of its guests."""

UNNAMED = ""
"""Where `hosts` has the topology of runs that name no host: the one that the user named."""

_SHORT_HASH = 8


class Stored(Struct, frozen=True):
    """What lies next to a run: the plan that it was made under; the machine that it saw."""

    plan: Plan | None = None
    guest: Host | None = None


class Machine(Struct, frozen=True):
    """One machine's part of a report.

    name: unlike those of the others. chosen: its alternatives, the baseline first. rest: figures of
    no layout. series: of every alternative, by label. comparison: None with fewer than two. bare:
    with a run on the host itself, where there are both. published: its document's system. sources:
    the documents that speak of it. host: its topology, where it is known. plans, guests: by
    alternative.
    """

    name: str
    runs: tuple[Run, ...]
    chosen: tuple[Alternative, ...]
    rest: tuple[Alternative, ...]
    series: Mapping[str, Mapping[SeriesKey, Series]]
    verdicts: tuple[Verdict, ...]
    graded: Graded
    comparison: Comparison | None
    bare: Comparison | None
    effects: tuple[SwitchEffect, ...]
    doubts: tuple[Doubt, ...]
    published: System | None
    sources: tuple[Publication, ...]
    host: Host | None
    plans: Mapping[str, Plan]
    guests: Mapping[str, Host]

    @property
    def is_published(self) -> bool:
        return self.published is not None

    @property
    def every(self) -> tuple[Alternative, ...]:
        """All alternatives, those that can be chosen first."""
        return (*self.chosen, *self.rest)


def machines_of(
    runs: Sequence[Run],
    stored: Sequence[Stored],
    publications: Sequence[Publication],
    hosts: Mapping[str, Host],
) -> tuple[Machine, ...]:
    """The machines of these runs, in the order in which they come.

    stored: next to each run, in the same order. hosts: topologies, by a published system's
    description or by a host's fingerprint.
    """
    neighbours = {id(run): one for run, one in zip(runs, stored, strict=True)}
    groups: dict[tuple[bool, str, str | None], list[Run]] = {}
    for run in runs:
        is_published = run.head.origin is Origin.PUBLISHED
        where = None if is_published else run.head.host or run.head.host_kind
        groups.setdefault((is_published, run.head.system, where), []).append(run)
    names = [_name(key, list(groups)) for key in groups]
    unnamed = [key for key, those in groups.items() if not key[0] and not _hosts_of(those)]
    if len(unnamed) > 1:  # it is unknown which of them the user's host is
        hosts = {name: host for name, host in hosts.items() if name != UNNAMED}
    collects = gc.isenabled()
    # All that is made here lives as long as the report: collections that search through a million
    # samples find nothing, and take a quarter of the time.
    gc.disable()
    try:
        return tuple(
            _machine(name, tuple(those), neighbours, publications, hosts)
            for name, those in zip(names, groups.values(), strict=True)
        )
    finally:
        if collects:
            gc.enable()


def _name(key: tuple[bool, str, str | None], keys: Sequence[tuple[bool, str, str | None]]) -> str:
    is_published, system, where = key
    if sum(other[1] == system for other in keys) == 1:
        return system
    if is_published:
        return f"{system} (published)"
    short = where if where is None or " " in where else where[:_SHORT_HASH]
    return f"{system} on {short or 'a host that is not named'}"


def _machine(
    name: str,
    runs: tuple[Run, ...],
    neighbours: Mapping[int, Stored],
    publications: Sequence[Publication],
    hosts: Mapping[str, Host],
) -> Machine:
    system = _published_system(runs, publications)
    stated = runs if system is not None else _distinguished(runs)
    on_host = _bare_metal(stated)
    measured = tuple(run for run in stated if on_host is None or run not in on_host.runs)
    found = alternatives(measured)
    every = sorted(found, key=_order)
    rest = tuple(
        replace(one, label=ANY_LAYOUT)
        for one in every
        if one.switches == UNKNOWN_SWITCHES and one.arrangement is None
    )
    chosen = tuple(
        one for one in every if one.switches != UNKNOWN_SWITCHES or one.arrangement is not None
    )
    rest += () if on_host is None else (on_host,)
    host = _host(runs, system, hosts)
    # Of the runs as they are stored: their names are nothing that could be chosen.
    verdicts = _verdicts(name, runs, found, system, host, publications)
    series = {one.label: one.series for one in (*chosen, *rest)}
    comparison = compare_series(chosen, series) if len(chosen) > 1 else None
    bare = None
    if on_host is not None and chosen:
        bare = compare_series((on_host, *chosen), series, bare=True)
    own = (
        *(comparison.doubts if comparison is not None else ()),
        *(bare.doubts if bare is not None else ()),
    )
    alone = rest if comparison is not None else (*chosen, *rest)
    own = (*own, *(doubt for one in alone for doubt in doubts_of(one)))
    folders = _neighbours_of(chosen, runs, stated, neighbours)
    return Machine(
        name,
        stated,
        chosen,
        rest,
        series,
        verdicts,
        grade_of(verdicts),
        comparison,
        bare,
        switch_effects(name, chosen),
        once(dict.fromkeys(own)),
        system,
        tuple(one for one in publications if system is not None and one.system(system.name)),
        host,
        {label: one.plan for label, one in folders if one.plan is not None},
        {label: one.guest for label, one in folders if one.guest is not None},
    )


def _verdicts(
    name: str,
    runs: Sequence[Run],
    known: Sequence[Alternative],
    system: System | None,
    host: Host | None,
    publications: Sequence[Publication],
) -> tuple[Verdict, ...]:
    """The answers for a machine, of which the reader may know the host or nothing but its runs."""
    measured = () if system is not None else tuple(runs)
    machine: MachineFacts
    if host is not None:
        machine = facts_of_host(host, publications)
        measured = of_host(measured, host)
    else:
        machine = facts_of_runs(runs[0].head.system, runs, publications)
    evidence = Evidence(tuple(publications), measured)
    found = decide_all(evidence, replace(machine, name=name), known=known)
    figures = machine.nodes is not None
    return tuple(
        one for one in found if figures or one.level is not EvidenceLevel.REASONED or one.passed
    )


def _published_system(runs: Sequence[Run], publications: Sequence[Publication]) -> System | None:
    if any(run.head.origin is not Origin.PUBLISHED for run in runs):
        return None
    name = runs[0].head.system
    return next((found for d in publications if (found := d.system(name)) is not None), None)


def _bare_metal(runs: Sequence[Run]) -> Alternative | None:
    """Runs on the host itself, where others are of its guests: what these are a part of, and
    nothing that could be chosen."""
    vantages = {run.head.vantage for run in runs}
    if not {Vantage.GUEST, Vantage.HOST} <= vantages:
        return None
    on_host = tuple(run for run in runs if run.head.vantage is Vantage.HOST)
    head = on_host[0].head
    return Alternative(
        label=BARE,
        switches=head.switches,
        arrangement=head.arrangement,
        memory_mode=head.memory_mode,
        page_bytes=head.page_bytes,
        runs=on_host,
    )


def _distinguished(runs: tuple[Run, ...]) -> tuple[Run, ...]:
    """Runs of which no one has said what was chosen are distinguished by their names."""
    return tuple(
        structs.replace(run, head=structs.replace(run.head, arrangement=run.head.name))
        if run.head.switches == UNKNOWN_SWITCHES and run.head.arrangement is None
        else run
        for run in runs
    )


def _order(one: Alternative) -> int:
    """Presets in the order in which they add switches; whatever else after them, as it came."""
    names = list(PRESETS)
    name = one.switches.name
    if name in names and one.arrangement is None:
        return names.index(name)
    return len(names) + (one.switches == UNKNOWN_SWITCHES and one.arrangement is None)


def _neighbours_of(
    chosen: Iterable[Alternative],
    runs: Sequence[Run],
    stated: Sequence[Run],
    neighbours: Mapping[int, Stored],
) -> list[tuple[str, Stored]]:
    """What lies next to the first run of each alternative that has something."""
    # By their heads: where states are joined, an alternative has copies of its runs.
    of_run = {id(new.head): neighbours[id(old)] for old, new in zip(runs, stated, strict=True)}
    found = []
    for one in chosen:
        there = [of_run[id(run.head)] for run in one.runs if id(run.head) in of_run]
        plan = next((s.plan for s in there if s.plan is not None), None)
        guest = next((s.guest for s in there if s.guest is not None), None)
        found.append((one.label, Stored(plan, guest)))
    return found


def _hosts_of(runs: Sequence[Run]) -> dict[str, None]:
    """Fingerprints of the hosts that runs name."""
    return dict.fromkeys(run.head.host for run in runs if run.head.host is not None)


def _host(runs: Sequence[Run], system: System | None, hosts: Mapping[str, Host]) -> Host | None:
    if system is not None:
        return hosts.get(system.host or "")
    keys = _hosts_of(runs)
    if not keys:
        return hosts.get(UNNAMED)
    return next((hosts[key] for key in keys if key in hosts), None)
