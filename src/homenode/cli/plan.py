"""homenode plan: read, plan, print, write; for libvirt or for another target. [I/O]"""

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from msgspec.structs import replace

from homenode.cli.arguments.place import PlanArguments
from homenode.cli.terminal import (
    STANDARD_OUTPUT,
    check_can_write,
    console,
    error_console,
    note,
    permissions_of,
    print_diff,
    print_document,
    print_json,
    refuse_to_overwrite,
    write_bytes,
    write_text,
)
from homenode.errors import FINDINGS, UsageError
from homenode.plan.auto import refuse_auto, resolve_layout
from homenode.plan.pipeline import (
    PlannedFile,
    plan_file,
    plan_for_target,
    plan_manually,
    size_of_options,
    vm_of_options,
)
from homenode.plan.stored import encode_plan, encode_refusal, read_plan, with_planned
from homenode.safe.input_files import read_input
from homenode.text import command_line, did_you_mean
from homenode.vm.domain.copy import DEFAULT_NAME, check_name, new_domain
from homenode.vm.domain.restore import SavedOriginal, is_tuned_output, saved_original, write_tuned
from homenode.vm.domain.schema import refuse_new_errors
from homenode.vm.plan import LIBVIRT, Plan, Unplannable, is_critical
from homenode.vm.plan_options import AUTO, PlanOptions, refuse_objective
from homenode.vm.sources import load_host
from homenode.vm.targets.registry import (
    TARGETS,
    VmFile,
    kind_of,
    on_host,
    read_vm,
    target_named,
)

if TYPE_CHECKING:
    from homenode.machine.topology import Host
    from homenode.plan.auto import Choose
    from homenode.vm.model import Vm

OPTIONS = "options"
"""What to call a VM of which only options say something."""

SCRIPT_MODE = 0o755


def plan(asked: PlanArguments) -> None:
    """Plan, write and print as it is asked."""
    if asked.document is not None and asked.vm_file is not None:
        raise UsageError("give either --vm or a VM file, not both")
    refuse_objective(asked.options)
    if is_critical(run(asked).plan):
        raise SystemExit(FINDINGS)


def run(asked: PlanArguments, agreed: Callable[[PlannedFile], bool] | None = None) -> PlannedFile:
    """Plan, write and print. Nothing is written unless everything before succeeded.

    agreed: asked before anything is written, when all is printed; without it files are written
    first, so that whoever reads no more of what is printed has them.
    """
    if asked.manual.sibling_pus and not asked.manual.node_pus:
        raise UsageError("--sibling-cpus: expected --node-cpus as well, found none")
    check_outputs(asked)
    document = asked.document or asked.vm_file
    hint = "virsh dumpxml --inactive NAME > VM.xml"
    original = None if document is None else read_input(document, "a domain document", hint=hint)
    source = OPTIONS if document is None else document
    target = _target(original, source, asked)
    _check_files(original, source, target, asked)
    try:
        planned, why = (
            (_planned_manually(original, source, asked), ())
            if asked.manual.node_pus
            else _planned(original, source, target, asked)
        )
    except Unplannable as error:
        say_why_not(error, as_json=asked.json)
        raise SystemExit(error.exit_code) from None
    if agreed is None:
        lines = _write(planned, original, source, asked)
        _print(planned, why, original, source, asked)
    else:
        _print(planned, why, original, source, asked)
        lines = _write(planned, original, source, asked) if agreed(planned) else []
    for line in lines:
        note(line)
    return planned


# What is asked.


def refuse_unknown_target(target: str) -> None:
    """Raises UsageError for a name that is no target's."""
    known: tuple[str, ...] = (LIBVIRT, *TARGETS)
    if target not in known:
        raise UsageError(
            f"--target: expected {', '.join(known)}, found {target!r}",
            hint=did_you_mean(target, known) or None,
        )


def _target(original: bytes | None, source: str, asked: PlanArguments) -> str:
    """For which hypervisor the plan is written: the one asked for, or the file's own. Raises
    UsageError for options that are not for it."""
    target = asked.target
    if target is not None:
        refuse_unknown_target(target)
    kind = target or LIBVIRT
    if original is not None and target in (None, LIBVIRT):
        kind = kind_of(original, source)
        if target is not None and kind != LIBVIRT:
            raise UsageError(
                f"--target libvirt: expected a domain document to write the plan into, found "
                f"{kind}'s file",
                hint="virsh dumpxml --inactive NAME > VM.xml; or leave the file out, and --vcpus, "
                "--memory and --gpus make a new domain",
            )
    if kind == LIBVIRT:
        if asked.target_version is not None:
            raise UsageError("--target-version: expected a --target, found libvirt: use --libvirt")
    elif asked.manual.node_pus:
        raise UsageError("--node-cpus: expected a domain document, found --target or another file")
    elif asked.name is not None and original is not None:
        raise UsageError("--name: expected a domain document to copy, found --target")
    return kind


def _refuse_with_ranges(asked: PlanArguments) -> None:
    """Manual mode takes vCPUs and PUs from the lists, and has no host to choose or draw from."""
    for option, given in (
        ("--host", bool(asked.hosts)),
        ("--lspci", asked.lspci is not None),
        ("--svg", asked.svg is not None),
        ("--vcpus", asked.options.vcpus is not None),
        ("--gpus", asked.options.gpu_count is not None),
        ("--with-nics", asked.options.with_nics),
        ("--with-nvswitches", asked.options.with_nvswitches),
        ("--device UUID", any(isinstance(one, str) for one in asked.options.devices)),
        ("--ignore-domain", bool(asked.options.replaces)),
        ("--after", bool(asked.after)),
        ("--guest-node", bool(asked.options.explicit_cells)),
    ):
        if given:
            raise UsageError(f"give either --node-cpus or {option}, not both")


# The files to write.


def check_outputs(asked: PlanArguments) -> None:
    """Raises HostError and UsageError before anything is read: for folders that are not there, and
    for two things to write to one place."""
    printed = [one for one in (asked.output, asked.save_plan, asked.svg) if one == STANDARD_OUTPUT]
    if len(printed) + asked.json + asked.diff > 1 and printed:
        raise UsageError("-: expected one thing for standard output, found several")
    check_can_write(asked.save_plan, asked.svg, force=asked.force)
    check_can_write(asked.output, force=True)
    paths = [asked.output, asked.save_plan, asked.svg]
    if asked.output is not None and asked.output != STANDARD_OUTPUT:
        saved = saved_original(asked.output)
        paths += [saved.original, saved.record]
    _refuse_one_path(paths)


def _check_files(original: bytes | None, source: str, target: str, asked: PlanArguments) -> None:
    """The same for what is there already: only files of homenode's own are overwritten, and the
    VM's, whose original is kept."""
    output = asked.output
    if output is None or output == STANDARD_OUTPUT:
        return
    if target != LIBVIRT:
        suffix = target_named(target).hook_suffix
        script = None if suffix is None else output.with_name(output.name + suffix)
        check_can_write(script, force=asked.force)
        _refuse_one_path((output, script, asked.save_plan, asked.svg))
    if original is not None and kind_of(original, source, target) == target:
        check_tuned_output(source, output, force=asked.force)
    elif target != LIBVIRT:
        check_can_write(output, force=asked.force)
    elif not asked.force and output.is_file() and output.stat().st_size:
        # It may be the same domain, to which somebody has added disks since.
        raise UsageError(
            f"{output}: expected no file for a new domain, found one",
            hint=f"{command_line('homenode', 'plan', output)} plans that one; --force overwrites "
            "it",
        )


def _refuse_one_path(paths: Iterable[Path | None]) -> None:
    """Raises UsageError where two of the files that a command writes are one."""
    seen: set[Path] = set()
    for path in paths:
        if path is None or path == STANDARD_OUTPUT:
            continue
        real = path.resolve()
        if real in seen:
            raise UsageError(
                f"{path}: expected a file for each thing to write, found the same one twice",
                hint="give -o, --save-plan and --svg names of their own",
            )
        seen.add(real)


def check_tuned_output(document: str, path: Path | None, *, force: bool | None = None) -> None:
    """Raises UsageError where -o is a file that is neither the VM's nor tuned by homenode. force:
    overwrite it; None where no option says so."""
    if path is None or path == STANDARD_OUTPUT or force or not path.is_file():
        return
    # Over the document itself the original is kept, and so it is over what was tuned from it.
    is_same = document != "-" and Path(document).exists() and path.samefile(document)
    if not is_same and path.stat().st_size and not is_tuned_output(path):
        refuse_to_overwrite(path, has_force=force is not None)


# Hosts and layouts.


def _planned_manually(original: bytes | None, source: str, asked: PlanArguments) -> PlannedFile:
    if original is None:
        raise UsageError("--node-cpus: expected a domain document, found none")
    _refuse_with_ranges(asked)
    refuse_auto(asked.options)
    return plan_manually(original, source, asked.options, asked.manual, copy_name=asked.name)


def _planned(
    original: bytes | None, source: str, target: str, asked: PlanArguments
) -> tuple[PlannedFile, tuple[str, ...]]:
    """(the plan on the best host and its file, why this layout)."""
    hosts = _hosts(asked)
    name, architecture = asked.name, hosts[0].architecture
    if original is not None:
        vm = read_vm(original, source, target)
    elif target != LIBVIRT:
        vm = vm_of_options(asked.options, architecture, check_name(name or DEFAULT_NAME))
    else:
        size = size_of_options(asked.options)
        new = new_domain(*size, architecture=architecture, name=name or DEFAULT_NAME)
        vm, name = read_vm(new, source), None
    choose = choose_by(asked.results)
    best = hosts[0] if len(hosts) == 1 else best_of(vm.guest, hosts, choose, asked)
    vm = on_host(vm, best)
    note_sick_links(best, asked.options)
    chosen = resolve_layout(vm.guest, asked.options, best, choose)
    return _on_host(vm, chosen.options, best, target, name, asked), chosen.reasons


def _on_host(
    vm: VmFile,
    options: PlanOptions,
    host: "Host",
    target: str,
    name: str | None,
    asked: PlanArguments,
) -> PlannedFile:
    if target != LIBVIRT:
        return plan_for_target(vm, options, host, target, asked.target_version)
    assert vm.content is not None, "a new domain has a document"
    return plan_file(vm.content, vm.source, options, host, copy_name=name)


def _hosts(asked: PlanArguments) -> "tuple[Host, ...]":
    names = asked.hosts or (None,)
    if len(names) > 1 and asked.lspci is not None:
        raise UsageError("--lspci: expected one --host to lay it over, found several")
    if len(names) > 1 and asked.options.replaces:
        raise UsageError(
            "--ignore-domain: expected one --host, which has the domain, found several"
        )
    hosts = tuple(with_versions(load_host(name, lspci=asked.lspci), asked) for name in names)
    return hosts_after(hosts, asked.after)


def with_versions(host: "Host", asked: PlanArguments) -> "Host":
    """The host with the versions that were given instead of those found."""
    settings = host.settings
    return replace(
        host,
        settings=replace(
            settings,
            libvirt_version=asked.libvirt or settings.libvirt_version,
            qemu_version=asked.qemu or settings.qemu_version,
        ),
    )


def hosts_after(hosts: "tuple[Host, ...]", plans: Sequence[Path]) -> "tuple[Host, ...]":
    """The hosts with the VMs of the saved plans of --after. Raises InputError, UsageError."""
    if not plans:
        return hosts
    hint = "homenode plan --save-plan writes one"
    read = [(str(path), read_input(path, "a saved plan", hint=hint)) for path in plans]
    return with_planned(hosts, [(source, read_plan(text, source)) for source, text in read])


def choose_by(results: Sequence[str]) -> "Choose | None":
    """What chooses a layout in place of the table: these results; None without any."""
    if not results:
        return None
    from homenode.decide.sentences import by_results
    from homenode.measure.imported.sources import load_sources

    return by_results([run for named in load_sources(results) for run in named.runs])


def note_sick_links(host: "Host", options: PlanOptions) -> None:
    """Warn of the host's slow links where homenode chooses the layout: each is slow on them."""
    if options.layout != AUTO:
        return
    from homenode.check.doctor.links import link_health

    for finding in link_health(host):
        note(f"warning: {finding.subject}: found {finding.observed}, expected {finding.expected}")
        note(f"  {finding.fix} ({finding.id})")


def best_of(
    guest: "Vm",
    hosts: "Sequence[Host]",
    choose: "Choose | None",
    asked: PlanArguments,
) -> "Host":
    """The host that takes the VM best, and a line on it."""
    from homenode.plan.planner import rank
    from homenode.plan.request import request_for
    from homenode.show.fit_text import rank_text

    requests = []
    for host in hosts:
        chosen = resolve_layout(guest, asked.options, host, choose).options
        requests.append((host, request_for(guest, chosen, host)))
    ranking = rank(requests)
    if not (asked.quiet or asked.json):
        console().print(rank_text(ranking))
    best = ranking[0].host
    if ranking[0].placement is None:
        note(f"none of the {len(hosts)} hosts can hold the VM; why {best.name} cannot:")
    else:
        note(f"best host: {best.name}")
    return best


# What is printed.


def say_why_not(error: Unplannable, *, as_json: bool = False) -> None:
    """Every rejection, for people on standard error or as JSON on standard output."""
    if as_json:
        print_json(encode_refusal(error))
    else:
        from homenode.show.explain import rejections_text

        error_console().print(rejections_text(error))


def _print(
    planned: PlannedFile,
    why: Sequence[str],
    original: bytes | None,
    source: str,
    asked: PlanArguments,
) -> None:
    if asked.json:
        print_json(encode_plan(planned.plan))
    elif asked.quiet:
        note_critical(planned.plan)
    else:
        from homenode.show.explain import explain

        outputs = (asked.output, asked.save_plan, asked.svg)
        screen = error_console() if STANDARD_OUTPUT in outputs else console()
        screen.print(explain(planned.plan, _as_left(planned, asked), whole=asked.explain, why=why))
    if asked.diff:
        before = (original or b"") if planned.target == LIBVIRT else planned.original
        name = "tuned" if planned.target == LIBVIRT else planned.target
        print_diff(before, planned.document, source, str(asked.output or name))


def _as_left(planned: PlannedFile, asked: PlanArguments) -> "Host | None":
    """The host without the domains that the VM replaces: the picture would show them on its PUs."""
    host = planned.host
    if host is None or planned.target != LIBVIRT:
        return host
    return host.without_domains(asked.options.replaces)


def note_critical(made: Plan) -> None:
    """Print what makes the exit code 1, and VMs that were not read, without the explanation."""
    from homenode.show.explain import finding_lines, unread_lines

    for line in (*finding_lines(made, ("critical",)), *unread_lines(made)):
        note(line)


# What is written.


def _write(
    planned: PlannedFile, original: bytes | None, source: str, asked: PlanArguments
) -> list[str]:
    """Write what is wanted; what to say of it."""
    lines = []
    if asked.output is not None:
        if planned.target != LIBVIRT:
            original = planned.original or None
        lines += write_document(planned, original, asked.output, permissions_of(source))
    lines += planned.notes
    if asked.save_plan is not None:
        write_text(asked.save_plan, encode_plan(planned.plan))
    if asked.svg is not None:
        host = _as_left(planned, asked)
        assert host is not None, "manual mode was refused --svg before"
        from homenode.show.topology_map import topology_map

        write_text(asked.svg, topology_map(host, planned.plan))
    files = (one for one in (asked.save_plan, asked.svg) if one is not None)
    return [*lines, *(f"wrote {one}" for one in files if one != STANDARD_OUTPUT)]


def write_document(
    planned: PlannedFile, original: bytes | None, output: Path, mode: int
) -> list[str]:
    """Write the file with its scripts, and its original next to it; or the file to standard output.
    What to say of it. A domain document is checked against libvirt's schema, if it is installed.

    original: None = a new file.
    """
    document, lines = planned.document, []
    if planned.target == LIBVIRT:
        gap = refuse_new_errors(planned.original, document, planned.libvirt)
        lines = [] if gap is None else [f"not checked: {gap}"]
    if output == STANDARD_OUTPUT:
        print_document(document)
        return lines
    for suffix, content in planned.rendering.companions:
        script = output.with_name(output.name + suffix)
        write_bytes(script, content, SCRIPT_MODE)
        lines.append(f"wrote {script}")
    if original is None:
        write_bytes(output, document, SCRIPT_MODE if document.startswith(b"#!") else None)
        return [*lines, f"wrote {output}"]
    return [*lines, written(write_tuned(output, original, document, mode))]


def written(saved: SavedOriginal) -> str:
    """What to say of a tuned document and its original."""
    return f"wrote {saved.output} (original in {saved.original}; homenode restore undoes it)"
