"""homenode apply: define a tuned definition in libvirt. [I/O]"""

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import repeat
from pathlib import Path

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from homenode.change import journal
from homenode.change.apply.define_step import ApplyOutcome, DomainChange
from homenode.change.apply.definition import (
    apply_definitions,
    preview_definition,
    reject_obstacles,
)
from homenode.change.apply.live_pins import RepinnedThreads, apply_live_pins, preview_live_pins
from homenode.cli.arguments.place import ApplyArguments
from homenode.cli.command import format_words
from homenode.cli.plan import (
    apply_plans,
    choose_by,
    note_critical,
    print_refusal,
    warn_slow_links,
)
from homenode.cli.restore import changing_host, is_file_target
from homenode.cli.terminal import (
    ask,
    check_can_ask,
    check_can_write,
    make_console,
    note,
    note_written,
    print_diff,
    print_json,
    say,
    write_text,
)
from homenode.cpuset import CpuSet
from homenode.doc import Doc, Text
from homenode.errors import FINDINGS, HostError, UsageError, exclusive
from homenode.findings import Rejection
from homenode.formats import encode
from homenode.machine.pci import DeviceKind
from homenode.machine.topology import Host
from homenode.plan.pipeline import FileRequest, PlannedFile, plan_several
from homenode.plan.planner import ResolvedLayout, resolve_layout
from homenode.plan.stored import encode_plan
from homenode.safe.input_files import read_input
from homenode.show.explain import build_change_doc, explain
from homenode.text import command_line, format_cpus, plural, shorten_list
from homenode.vm.domain.read import read_vm
from homenode.vm.domain.schema import reject_new_errors
from homenode.vm.host_sources import load_daemon_host, reject_tuned_for_other, reject_unread_vms
from homenode.vm.hypervisor.connection import DEFAULT, add_connection, check_host
from homenode.vm.hypervisor.virsh import Virsh
from homenode.vm.layout import PRESETS, Pinning, Siblings, add_preset_name
from homenode.vm.model import PortModel, Vm
from homenode.vm.plan import Unplannable, is_critical
from homenode.vm.plan_options import AUTO, PciGranularity, PlanOptions, reject_objective


class MovedThread(Struct, frozen=True, kw_only=True):
    """A thread of a running domain."""

    kind: str  # "vcpu", "emulator" or "iothread"
    number: int
    before: CpuSet
    after: CpuSet


class AppliedDomain(Struct, frozen=True, kw_only=True):
    name: str
    uuid: str
    changed: bool
    original: str | None  # path of the saved original; None with --live-pins
    plan: dict[str, object] | None  # as plan --json prints it; None with --domain
    obstacles: tuple[Rejection, ...] = ()
    edited: bool = False
    threads: tuple[MovedThread, ...] = ()


class ApplyAnswer(Struct, frozen=True, kw_only=True):
    dry_run: bool  # `changed` is what would be
    domains: tuple[AppliedDomain, ...]


def apply(arguments: ApplyArguments) -> None:
    """Plan, show the change, prompt for confirmation, and define it."""
    reject_objective(arguments.options)
    if files := [name for name in arguments.names if is_file_target(name)]:
        host = () if arguments.host is None else ("--host", arguments.host)
        raise UsageError(
            f"{files[0]}: a file, not a domain of libvirt",
            hint=command_line(
                "homenode", "plan", files[0], *host, "-o", _name_tuned_file(files[0])
            ),
        )
    if len(arguments.names) > 1:
        _reject_for_several(arguments)
    if arguments.domain is not None:
        _reject_planning(arguments)
    check_can_write(arguments.save_plan, force=arguments.force)
    check_host(arguments.host, arguments.connect)
    tunings: tuple[PlannedFile, ...] = ()
    screens: list[Doc] = []
    with changing_host("apply", arguments.names, arguments.connect, dry_run=arguments.dry_run):
        virsh = Virsh(arguments.connect)
        states = {state.uuid: state for state in map(virsh.find_domain, arguments.names)}
        originals = {state.name: virsh.read_definition(uuid) for uuid, state in states.items()}
        _check_can_ask(arguments)  # after it is known that something would change
        machine = load_daemon_host(arguments.host, virsh)
        reject_unread_vms(machine)
        if arguments.domain is not None:
            hint = "homenode plan VM.xml -o OUT.xml"
            tuned: tuple[bytes, ...] = (read_input(arguments.domain, "a domain XML", hint=hint),)
            reject_tuned_for_other(read_vm(tuned[0], str(arguments.domain)), machine)
        else:
            is_quiet = arguments.quiet or arguments.json
            tunings = plan_together(
                originals,
                arguments.options,
                machine,
                arguments.after,
                arguments.results,
                show=None if is_quiet else screens.append,
                full=arguments.explain,
                as_json=arguments.json,
            )
            tuned = tuple(tuning.document for tuning in tunings)
        changes = tuple(
            DomainChange(name=uuid, tuned=document, original=originals[state.name])
            for (uuid, state), document in zip(states.items(), tuned, strict=True)
        )
        if arguments.live_pins:
            _move(virsh, changes[0], arguments, tunings, screens)
        else:
            _confirm_changes(virsh, changes, arguments, tunings, screens)
    if arguments.save_plan is not None and tunings:
        write_text(arguments.save_plan, encode_plan(tunings[0].plan))
        note_written(arguments.save_plan)
    if any(is_critical(tuning.plan) for tuning in tunings):
        raise SystemExit(FINDINGS)


def _name_tuned_file(file: str) -> str:
    """Return a name for the tuned file."""
    return f"tuned{Path(file).suffix or '.xml'}"


def _check_can_ask(arguments: ApplyArguments) -> None:
    if arguments.json and not (arguments.yes or arguments.dry_run):
        raise UsageError("--json requires --yes or --dry-run: it does not prompt")
    check_can_ask(asks=not (arguments.yes or arguments.dry_run))


def _reject_for_several(arguments: ApplyArguments) -> None:
    """Raise UsageError for an option that is for one domain."""
    for option, is_given in (
        ("--domain", arguments.domain is not None),
        ("--live-pins", arguments.live_pins),
        ("--save-plan", arguments.save_plan is not None),
    ):
        if is_given:
            raise UsageError(f"{option} is for one domain, found {len(arguments.names)}")


def _reject_planning(arguments: ApplyArguments) -> None:
    """Raise UsageError for options of a plan that would do nothing."""
    words = [
        *format_words(arguments.options),
        *(f"--results {option}" for option in arguments.results),
    ]
    words += [f"--after {option}" for option in arguments.after]
    if arguments.save_plan is not None:
        words.append("--save-plan")
    if words:
        raise exclusive(words[0].split()[0], "--domain")


def plan_together(
    originals: Mapping[str, bytes],
    options: PlanOptions,
    machine: Host,
    after: Sequence[Path],
    results: Sequence[str],
    *,
    show: Callable[[Doc], object] | None = None,
    full: bool = False,
    as_json: bool = False,
) -> tuple[PlannedFile, ...]:
    """Plan VMs by name on one host, or exit. show: called with each explanation."""
    # Pins of these domains do not count as allocated, even if the domains are running.
    (machine,) = apply_plans((machine.without_domains(originals),), after)
    choose = choose_by(results)
    layouts = {}
    for name, original in originals.items():
        guest = read_vm(original, name)
        recorded_layout = (
            ResolvedLayout(options) if results else _use_recorded_layout(guest, options, machine)
        )
        layout = resolve_layout(guest, recorded_layout.options, machine, choose)
        layouts[name] = replace(layout, reasons=recorded_layout.reasons or layout.reasons)
    requests = [
        FileRequest(name=name, original=original, options=layouts[name].options)
        for name, original in originals.items()
    ]
    try:
        tunings = plan_several(requests, machine)
    except Unplannable as error:
        print_refusal(error, as_json=as_json, command="apply")
        raise SystemExit(error.exit_code) from None
    for name, tuning in zip(originals, tunings, strict=True):
        gap = reject_new_errors(tuning.original, tuning.document, tuning.libvirt)
        if gap is not None:
            note(f"not checked: {gap}")
        if show is not None:
            host = (tuning.host or machine).without_domains(options.replaces)
            show(explain(tuning.plan_to_show, host, reasons=layouts[name].reasons, full=full))
        else:
            note_critical(tuning.plan)
        for line in tuning.notes:
            note(line)
    warn_slow_links(machine, options)
    return tunings


def _use_recorded_layout(guest: Vm, options: PlanOptions, host: Host) -> ResolvedLayout:
    """Return the options with the VM's recorded layout, unless they name a layout or an objective.
    Raises HostError if it was planned for another host and this host's nodes cannot be read."""
    record = guest.record
    if record is None or options.layout != AUTO or options.objective is not None:
        return ResolvedLayout(options)
    is_same = record.host is not None and host.has_fingerprint(record.host)
    if not is_same and host.nodes_assumed:
        raise HostError(
            f"{host.name}: the NUMA nodes cannot be read",
            hint="run it on the host itself, not in a container, or pass a capture: --host",
        )
    layout = record.layout
    shares = layout.pinning is Pinning.ALL_PUS and layout.siblings is Siblings.HIDDEN
    lacked_cores = shares and record.multiplied is False  # so vCPUs share cores
    if lacked_cores or options.pinning is Pinning.ONE_PER_CORE:
        layout = add_preset_name(
            replace(layout, pinning=Pinning.ONE_PER_CORE, siblings=Siblings.HIDDEN)
        )
    planned = "this host as it is" if is_same else "another host, or this host before it changed"
    reason = f"{layout.name}, kept from the metadata of {guest.name}: planned for {planned}"
    has_switches = any(c.model == PortModel.SWITCH_UPSTREAM for c in guest.controllers)
    switches = PciGranularity.SWITCH if has_switches else None
    options = replace(
        options,
        layout=layout.name if layout.name in PRESETS else "pin",
        pinning=options.pinning or layout.pinning,
        # With one CPU per core the layout hides siblings, not the user.
        siblings=options.siblings
        or (None if layout.pinning is Pinning.ONE_PER_CORE else layout.siblings),
        cells=options.cells or layout.cells,
        pcie=options.pcie or layout.pcie,
        memory_binding=options.memory_binding or layout.memory,
        pci_granularity=options.pci_granularity or switches,
        objective=record.objective,
    )
    return ResolvedLayout(options, (reason,))


def _confirm_changes(
    virsh: Virsh,
    changes: Sequence[DomainChange],
    arguments: ApplyArguments,
    tunings: Sequence[PlannedFile],
    screens: Sequence[Doc],
) -> None:
    """Show the change, prompt for confirmation, and define all documents or none. Raises UsageError
    with every obstacle. Domains without a change are skipped."""
    root = journal.default_root()
    if arguments.dry_run or not arguments.yes:
        previews = [
            preview_definition(virsh, change.name, change.tuned, change.original, root)
            for change in changes
        ]
        if not arguments.json:
            for preview in previews:
                if not preview.changed:
                    say(f"{preview.state.name}: {_UNCHANGED}")
        _print_screens(screens)
        if arguments.json:
            _answer(arguments, map(_build_answer, previews), tunings)
        else:
            for change, preview in zip(changes, previews, strict=True):
                _show_change(change, preview, tunings, with_diff=arguments.diff)
        reject_obstacles([obstacle for preview in previews for obstacle in preview.obstacles])
        if arguments.dry_run:
            _print_answer(arguments, "dry run: nothing was changed")
        if arguments.dry_run or not any(preview.changed for preview in previews):
            return
        ask(f"Define {shorten_list((preview.state.name for preview in previews), 3)}?")
    outcomes = apply_definitions(virsh, changes, root)
    for outcome in outcomes:
        text = "defined; its next start uses it" if outcome.changed else _UNCHANGED
        _print_answer(arguments, f"{outcome.state.name}: {text}")
        if outcome.edited:
            note(f"warning: {outcome.state.name} was edited at the same moment: the edits stay")
        _warn_of_original(outcome)
    if arguments.yes:
        _print_screens(screens)
    names = [outcome.state.argument for outcome in outcomes if outcome.changed]
    if names:
        is_default = virsh.connect == DEFAULT and os.geteuid() == 0
        connection = () if is_default else ("-c", virsh.connect)
        start = command_line("virsh", *connection, "start", names[0])
        verify = add_connection(virsh.connect, "homenode", "verify", "--live", names[0])
        likewise = f"; likewise {', '.join(names[1:])}" if names[1:] else ""
        _print_answer(arguments, f"next  {start}, then {command_line(*verify)}{likewise}")
        undo = add_connection(virsh.connect, "homenode", "restore", *names)
        _print_answer(arguments, f"undo  {command_line(*undo)}")
    if arguments.json:
        _answer(arguments, map(_build_answer, outcomes), tunings)


_UNCHANGED = "has this definition already"


def _print_answer(arguments: ApplyArguments, text: str) -> None:
    """Print a line of the answer; with --json, on standard error."""
    (note if arguments.json else say)(text)


def _print_screens(screens: Sequence[Doc]) -> None:
    for screen in screens:
        make_console().print(screen)


def _show_change(
    change: DomainChange, preview: ApplyOutcome, tunings: Sequence[PlannedFile], *, with_diff: bool
) -> None:
    name = preview.state.name
    _warn_of_original(preview)
    if not preview.changed:
        return
    hosts = [tuning.host for tuning in tunings if tuning.host is not None]
    gpus = frozenset(gpu.bdf for host in hosts for gpu in host.devices_of_kind(DeviceKind.GPU))
    make_console().print(build_change_doc(name, change.original, change.tuned, gpus))
    if with_diff:
        print_diff(change.original, change.tuned, f"{name} (now)", f"{name} (tuned)")


def _warn_of_original(outcome: ApplyOutcome) -> None:
    if outcome.is_original_placed:
        note(
            f"warning: {outcome.state.name}: no saved original exists: its present definition, "
            "which has a layout of homenode already, was saved as the original"
        )


def _build_answer(outcome: ApplyOutcome) -> AppliedDomain:
    return AppliedDomain(
        name=outcome.state.name,
        uuid=outcome.state.uuid,
        changed=outcome.changed,
        original=str(outcome.original),
        plan=None,
        obstacles=outcome.obstacles,
        edited=outcome.edited,
    )


def _answer(
    arguments: ApplyArguments, domains: Iterable[AppliedDomain], tunings: Sequence[PlannedFile]
) -> None:
    """Print the JSON, with the plans of this call."""
    plans = [msgspec.json.decode(encode_plan(tuning.plan)) for tuning in tunings] or repeat(None)
    answers = tuple(
        replace(domain, plan=plan) for domain, plan in zip(domains, plans, strict=False)
    )
    print_json(encode("applied", ApplyAnswer(dry_run=arguments.dry_run, domains=answers)))


def _move(
    virsh: Virsh,
    change: DomainChange,
    arguments: ApplyArguments,
    tunings: Sequence[PlannedFile],
    screens: Sequence[Doc],
) -> None:
    """Show the new CPUs of a running domain's threads, prompt for confirmation, and move them."""
    if arguments.dry_run or not arguments.yes:
        moved = preview_live_pins(virsh, change.name, change.tuned)
        _print_screens(screens)
        if moved.after and not arguments.json:
            make_console().print(_build_threads_doc(moved))
        if arguments.dry_run:
            _print_answer(arguments, "dry run: nothing was changed")
        elif moved.after:
            ask(f"Move the threads of {moved.state.name}?")
    if not arguments.dry_run:
        moved = apply_live_pins(virsh, change.name, change.tuned, journal.default_root())
    name = moved.state.name
    count = plural(len(moved.after), "thread")
    if not moved.after:
        _print_answer(arguments, f"{name}: every thread runs on its planned CPUs")
    elif not arguments.dry_run:
        _print_answer(arguments, f"{name}: {count} moved; its definition is as it was")
        if arguments.yes:
            _print_screens(screens)
        undo = add_connection(virsh.connect, "homenode", "restore", moved.state.argument)
        _print_answer(arguments, f"undo  {command_line(*undo)}")
    if moved.strangers:
        note(
            f"warning: {name}: memory stays on node {moved.strangers}, which the plan does "
            "not use: shut the VM down and apply"
        )
    if arguments.json:
        threads = tuple(
            MovedThread(kind=new.kind, number=new.number, before=old.pus, after=new.pus)
            for old, new in zip(moved.before, moved.after, strict=True)
        )
        domain = AppliedDomain(
            name=name,
            uuid=moved.state.uuid,
            changed=bool(threads),
            original=None,
            plan=None,
            threads=threads,
        )
        _answer(arguments, (domain,), tunings)


def _build_threads_doc(threads: RepinnedThreads) -> Doc:
    """Return a line for each kind of thread: the number to move, and their CPUs."""
    lines = [f"change: {plural(len(threads.after), 'thread')} would move"]
    for kind in dict.fromkeys(pin.kind for pin in threads.after):
        pins = [pin for pin in threads.after if pin.kind == kind]
        cpus = format_cpus(CpuSet.union(pin.pus for pin in pins))
        lines.append(f"  {len(pins):>4} {kind:<9} to {cpus}")
    return Doc("", tuple(Text(line, hang=24) for line in lines))
