"""Prepare: check and store a trial before its first boot, and read it back to resume. [I/O]"""

import shutil
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

from msgspec import Struct

from homenode import formats
from homenode.change.apply.definition import preview_definition
from homenode.errors import InputError, UsageError
from homenode.machine.topology import Host
from homenode.measure.preparation import list_host_versions
from homenode.measure.results.model import host_kind
from homenode.measure.trial.boot_steps import ORIGINAL
from homenode.measure.trial.copying import PreparedCopy, prepare_copy
from homenode.measure.trial.fitting import PlannedLayout, find_short_memory, fit, remove_domain
from homenode.measure.trial.journal import (
    MeasureOptions,
    StoredTrial,
    TrialConfig,
    TrialHead,
    TrialJournal,
    list_names,
    list_trials,
)
from homenode.measure.trial.runner import TrialSetup, TunedCopy, is_emulated
from homenode.objective import Objective
from homenode.plan.stored import encode_plan, read_plan
from homenode.process import find_program, install_hint
from homenode.text import command_line
from homenode.units import format_bytes
from homenode.vm.domain.read import open_domain, read_vm
from homenode.vm.domain.schema import reject_new_errors
from homenode.vm.hypervisor.connection import DomainState, GuestAccess, Transport
from homenode.vm.hypervisor.virsh import Virsh
from homenode.vm.plan_options import PlanOptions

_BEGUN, _COPY = "begun.json", "copy.xml"


class TrialRequest(Struct, frozen=True):
    """The user's request."""

    id: str  # the trial's name
    layouts: tuple[str, ...]  # layouts of the schedule
    boots: int  # boots of the schedule
    seed: int  # seed of the schedule
    bare: bool
    as_copy: bool
    results: Path
    placing: PlanOptions  # options of the placement; its layout is replaced
    apply_words: tuple[str, ...]  # `placing` as options of homenode apply
    measuring: MeasureOptions
    reaching: GuestAccess
    objective: Objective = Objective.MEMORY_BANDWIDTH  # what is to be decided


class Preflight(Struct, frozen=True):
    """A checked trial that is not written yet."""

    head: TrialHead
    begun: TrialConfig
    original: bytes
    fitted: tuple[PlannedLayout, ...]
    copy: PreparedCopy | None
    obstacles: tuple[str, ...]  # why it cannot run
    unchecked: tuple[str, ...]


def preflight(virsh: Virsh, name: str, request: TrialRequest, host: Host, root: Path) -> Preflight:
    """Plan every layout and collect the obstacles. Changes and writes nothing.

    Raises UsageError if the VM runs or an earlier trial of it is not undone, and as tune,
    preview_definition and prepare_copy do.
    """
    # Long because it fills the records of a trial, a field a line.
    state = virsh.find_domain(name)
    _reject_running(state)
    _reject_unfinished(state, root)
    original = virsh.read_definition(state.uuid)
    copy = prepare_copy(virsh, state, original, request.id) if request.as_copy else None
    document = original if copy is None else copy.document
    domain = state.name if copy is None else copy.copy.name
    # The copy gets the resources that the VM keeps while it is shut off.
    alone = remove_domain(host, state.name)
    fitted_layouts = fit(document, domain, request.placing, request.layouts, alone)
    unchecked_layouts = [
        f"{candidate.layout}: {gap}"
        for candidate in fitted_layouts
        if candidate.tuning is not None
        and (gap := reject_new_errors(candidate.tuning.original, candidate.tuning.document))
        is not None
    ]
    no_way = _find_obstacle(original, state.name, request.reaching.transport)
    obstacles = [] if no_way is None else [no_way]
    obstacles += find_short_memory(fitted_layouts, request.measuring.suite.groups)
    obstacles += _find_missing(request, copy)
    if copy is None:
        for candidate in fitted_layouts:
            if candidate.tuning is not None:
                would = preview_definition(
                    virsh, state.uuid, candidate.tuning.document, original, root
                )
                obstacles += [f"{obstacle}; {obstacle.hint}" for obstacle in would.obstacles]
    head = TrialHead(
        id=request.id,
        connect=virsh.connect,
        domain=domain,
        uuid=state.uuid if copy is None else copy.copy.uuid,
        source=state.name,
        layouts=request.layouts,
        boots=request.boots,
        seed=request.seed,
        results=str(request.results.absolute()),
        bare=request.bare,
        copy=None if copy is None else copy.copy,
        source_uuid=state.uuid,
        objective=request.objective,
    )
    config = TrialConfig(
        measuring=request.measuring,
        reaching=request.reaching,
        host_kind=host_kind(host),
        versions=tuple(list_host_versions(host)),
        emulated=is_emulated(original),
        apply_words=(*request.apply_words, *_find_nvlink_option(original, state.name)),
        disks=() if copy is None else copy.disks,
        nvram=None if copy is None else copy.nvram,
    )
    return Preflight(
        head=head,
        begun=config,
        original=original,
        fitted=fitted_layouts,
        copy=copy,
        obstacles=tuple(dict.fromkeys(obstacles)),
        unchecked=tuple(dict.fromkeys(unchecked_layouts)),
    )


def prepare(preflight: Preflight, journal: TrialJournal) -> None:
    """Store the trial, its head last: without a head it has not begun. Raises UsageError if one of
    its name exists, HostError."""
    if journal.has_journal:
        raise UsageError(
            f"{journal.journal_path}: a trial of this name exists",
            hint="another --name, or homenode trial resume",
        )
    journal.make()
    journal.write(_BEGUN, formats.encode("trial-config", preflight.begun).encode())
    journal.write(ORIGINAL, preflight.original)
    if preflight.copy is not None:
        journal.write(_COPY, preflight.copy.document)
    for candidate in preflight.fitted:
        if candidate.tuning is not None:
            journal.write(f"{candidate.layout}.xml", candidate.tuning.document)
            journal.write(
                f"{candidate.layout}.plan.json", encode_plan(candidate.tuning.plan).encode()
            )
    journal.begin_with(preflight.head)


def reopen(head: TrialHead, journal: TrialJournal) -> TrialSetup:
    """Return the files that `prepare` stored. Raises InputError or HostError if one is gone."""
    source = str(journal.path / _BEGUN)
    config = formats.decode(journal.read_kept(_BEGUN), "trial-config", TrialConfig, source)
    layouts = {
        layout: TunedCopy(
            read_plan(journal.read_kept(f"{layout}.plan.json"), f"{layout}.plan.json"),
            journal.read_kept(f"{layout}.xml"),
        )
        for layout in head.layouts
    }
    copy = None
    if head.copy is not None:
        copy = PreparedCopy(head.copy, journal.read_kept(_COPY), config.disks, config.nvram)
    return TrialSetup(head, config, layouts, copy)


def find_latest_trial(root: Path, name: str) -> StoredTrial:
    """Return the latest trial of a domain, or the trial with that id. Raises InputError."""
    trials = list_trials(root, name)
    readable = [trial for trial in trials if trial.head is not None]
    if trials and not readable:
        raise InputError(
            f"{trials[-1].reason}",
            hint="correct that line, or restore the VM's definition without the journal: "
            "homenode restore NAME, or "
            + command_line("virsh", "define", trials[-1].directory / ORIGINAL),
        )
    if not readable:
        raise InputError(f"no trial of {name}", hint="homenode trial status")
    return readable[-1]


def _reject_running(state: DomainState) -> None:
    if state.is_active:
        raise UsageError(
            f"{state.name}: it is {state.state}",
            hint="shut it down first: a trial boots it in each layout",
        )


def _reject_unfinished(state: DomainState, root: Path) -> None:
    unfinished_trials: Sequence[StoredTrial] = [
        trial
        for trial in list_trials(root)
        if trial.head is not None
        and state.uuid in list_names(trial.head)
        and (trial.state.to_undo or not trial.state.ended)
    ]
    for trial in unfinished_trials:
        if trial.state.to_undo or trial.entries:
            raise UsageError(
                f"{state.name}: trial {trial.directory.name} is unfinished",
                hint=f"homenode trial resume {state.argument} continues it, homenode trial undo "
                f"{state.argument} ends it",
            )


def _find_nvlink_option(original: bytes, name: str) -> tuple[str, ...]:
    """apply's option to accept GPUs that are not an NVLink partition, if they were planned so."""
    return ("--allow-no-nvlink",) if read_vm(original, name).hostdevs else ()


_ROOM_OF_DISK, _ROOM_OF_RESULTS = 1 << 30, 64 << 20
"""Bytes that a guest writes in its boots, and bytes of results."""


def _find_missing(request: TrialRequest, copy: PreparedCopy | None) -> Iterator[str]:
    """Yield the programs and disk space that a trial lacks, each with a fix."""
    programs = ["ssh"] if request.reaching.transport is Transport.SSH else []
    programs += ["qemu-img"] if copy is not None and copy.disks else []
    for program in programs:
        if find_program(program) is None:
            yield f"{program}: command not found; {install_hint(program)}"
    room = Counter({request.results.absolute(): _ROOM_OF_RESULTS})
    for overlay in () if copy is None else copy.copy.overlays:
        room[Path(overlay).parent] += _ROOM_OF_DISK
    for directory, size in room.items():
        existing = next(path for path in (directory, *directory.parents) if path.exists())
        free = shutil.disk_usage(existing).free
        if free < size:
            yield (
                f"{directory}: needs {format_bytes(size)} of free disk, {format_bytes(free)} free; "
                "free some, or choose another directory with --results"
            )


_AGENT = "org.qemu.guest_agent.0"


def _find_obstacle(document: bytes, name: str, transport: Transport) -> str | None:
    """Return the obstacle to reaching a domain this way, with its fix; None without one."""
    devices = open_domain(document, name).root.child("devices")
    children = () if devices is None else devices.children
    if transport is Transport.AGENT and not any(
        child.name == "channel"
        and (target := child.child("target")) is not None
        and target.get("name") == _AGENT
        for child in children
    ):
        return (
            f"{name}: no channel {_AGENT}; add <channel type='unix'><target type='virtio' "
            f"name='{_AGENT}'/></channel>, or use another --guest-access"
        )
    return None
