"""homenode plan: read, plan, print, write; for libvirt or for another target. [I/O]"""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from msgspec.structs import replace

from homenode.cli.arguments.place import PlanArguments
from homenode.cli.terminal import (
    STANDARD_OUTPUT,
    check_can_write,
    choose_permissions,
    get_error_console,
    make_console,
    note,
    print_diff,
    print_document,
    print_json,
    write_bytes,
    write_text,
)
from homenode.errors import FINDINGS, UsageError, exclusive, unknown
from homenode.findings import Severity
from homenode.plan.pipeline import (
    PlannedFile,
    compute_options_size,
    make_vm,
    plan_file,
    plan_for_target,
    plan_manually,
)
from homenode.plan.planner import reject_auto, resolve_layout
from homenode.plan.stored import add_planned, encode_plan, encode_refusal, read_plan
from homenode.process import ToolMissingError
from homenode.safe.input_files import read_input
from homenode.text import command_line
from homenode.vm.domain.copy import DEFAULT_NAME, check_name, make_domain
from homenode.vm.domain.restore import is_tuned_output, locate_original, write_tuned
from homenode.vm.domain.schema import reject_new_errors
from homenode.vm.plan import LIBVIRT, Plan, Unplannable, is_critical
from homenode.vm.plan_options import AUTO, PlanOptions, reject_objective
from homenode.vm.sources import load_host, names_domain, shows_xen
from homenode.vm.targets.registry import (
    TARGETS,
    add_host_facts,
    find_target,
    has_feature,
    read_vm,
    recognize_kind,
)
from homenode.vm.targets.target import Feature

if TYPE_CHECKING:
    from homenode.machine.topology import Host
    from homenode.plan.planner import Choose

SCRIPT_MODE = 0o755
_FILE_HINTS = {
    LIBVIRT: "virsh dumpxml --inactive NAME > VM.xml",
    "proxmox": "cp /etc/pve/qemu-server/VMID.conf .",
    "xen": "ls /etc/xen/*.cfg",
}
"""Commands that make or find the file of a VM."""
_SUFFIXES = {LIBVIRT: ".xml", "proxmox": ".conf", "qemu": ".sh", "xen": ".cfg"}
_STEPS = {
    LIBVIRT: "virsh define {0}",
    "proxmox": "cp {0} /etc/pve/qemu-server/{1}.conf",
    "qemu": "bash {0} prepare, then bash {0} start",
    "xen": "xl create {0}",
}
"""Commands that use the written file; 1 = the number of a VM of Proxmox."""


class VmSource(NamedTuple):
    """The VM's file, or its definition in libvirt."""

    content: bytes | None  # None = options alone
    name: str  # for messages
    target: str  # the hypervisor to write for
    domain: str | None = None  # the name of a VM of libvirt here, of which it is the definition


def plan(arguments: PlanArguments) -> None:
    """Plan, write and print; exit 1 for a critical finding. Nothing is written unless all earlier
    steps succeeded; files are written before the output, in case its reader stops."""
    reject_objective(arguments.options)
    if arguments.manual.sibling_pus and not arguments.manual.node_pus:
        raise UsageError("missing option --node-cpus: --sibling-cpus needs it")
    _check_paths(arguments)
    source = _read_source(arguments)
    _check_output(source, arguments)
    try:
        planned_file, reasons = _plan(source, arguments)
    except Unplannable as error:
        print_refusal(error, as_json=arguments.json)
        raise SystemExit(error.exit_code) from None
    lines = _write(planned_file, source, arguments)
    _print(planned_file, reasons, source, arguments)
    for line in lines:
        note(line)
    warn_slow_links(planned_file.host, arguments.options)
    if is_critical(planned_file.plan):
        raise SystemExit(FINDINGS)


# The VM.


def _read_source(arguments: PlanArguments) -> VmSource:
    """Return the VM's file and its target: the named one, the file's own, or Xen for a Xen host.
    Raises UsageError for options that are not for it."""
    path, target = arguments.document, arguments.target
    hint, content, domain = _FILE_HINTS[LIBVIRT], None, None
    if path is not None and names_domain(path) and target in (None, LIBVIRT):
        domain, content = read_definition(path)
    if path is not None and content is None:
        suffix = next((kind for kind, end in _SUFFIXES.items() if path.endswith(end)), LIBVIRT)
        content = read_input(path, "a domain XML", hint=_FILE_HINTS.get(target or suffix, hint))
    name = path or "options"
    if target is not None:
        reject_unknown_target(target)
    kind = target or LIBVIRT
    if content is not None and kind == LIBVIRT:
        kind = recognize_kind(content, name)
        if target is not None and kind != LIBVIRT:
            raise UsageError(
                f"--target libvirt: {name} is a file of {kind}, not a domain XML",
                hint=f"{hint}; or omit the file and set --vcpus, --memory and --gpus",
            )
    if target is None and kind == LIBVIRT and shows_xen(arguments.host):
        kind = "xen"
        if not arguments.quiet:
            note(f"target xen: {arguments.host} is of a Xen host; --target libvirt is for QEMU")
    if kind != LIBVIRT and arguments.manual.node_pus:
        raise UsageError("--node-cpus is for a domain XML, not for --target or another file")
    if kind != LIBVIRT and arguments.name is not None and content is not None:
        raise UsageError(
            "--name copies a domain XML, not a file of another target",
            hint="copy the file, and change its name there",
        )
    return VmSource(content, name, kind, domain)


def read_definition(name: str) -> tuple[str | None, bytes | None]:
    """Return (the argument that names a libvirt domain, its definition); (None, None) without
    libvirt.

    Raises InputError if libvirt has no VM of that name, HostError if it does not answer.
    """
    from homenode.vm.hypervisor.connection import DEFAULT
    from homenode.vm.hypervisor.virsh import Virsh

    virsh = Virsh(DEFAULT)
    try:
        state = virsh.find_domain(name)
        return state.argument, virsh.read_definition(state.uuid)
    except ToolMissingError:
        return None, None


def reject_unknown_target(target: str) -> None:
    """Raise UsageError for a name that is not a target."""
    names: tuple[str, ...] = (LIBVIRT, *TARGETS)
    if target not in names:
        hint = f"--target {'|'.join(names)}"
        if target in ("xapi", "xcp-ng", "xenserver"):
            hint = "--target xen, and the xe commands of docs/howto/xcp-ng.md"
        raise unknown("target", target, names, hint, "--target: ")


# The files to write.


def _check_paths(arguments: PlanArguments) -> None:
    """Raise before anything is read: for missing directories, and for two outputs to one file."""
    paths = (arguments.output, arguments.save_plan, arguments.svg)
    if arguments.json and arguments.diff:
        raise exclusive("--json", "--diff")
    printed_count = paths.count(STANDARD_OUTPUT)
    if printed_count and printed_count + arguments.json + arguments.diff > 1:
        raise UsageError("-: several outputs for standard output")
    check_can_write(arguments.save_plan, arguments.svg, force=arguments.force)
    check_can_write(arguments.output, force=True)
    saved = None
    if arguments.output is not None and arguments.output != STANDARD_OUTPUT:
        saved = locate_original(arguments.output)
    _reject_one_path((*paths, *((saved.original, saved.record) if saved else ())))


def _check_output(source: VmSource, arguments: PlanArguments) -> None:
    """Raise UsageError for an existing file, unless homenode wrote it."""
    output, is_libvirt = arguments.output, source.target == LIBVIRT
    if output is None or output == STANDARD_OUTPUT:
        return
    if not is_libvirt:
        suffix = find_target(source.target).hook_suffix
        script = None if suffix is None else output.with_name(output.name + suffix)
        check_can_write(script, force=arguments.force)
        _reject_one_path((output, script, arguments.save_plan, arguments.svg))
    content = source.content
    if content is not None and recognize_kind(content, source.name, source.target) == source.target:
        check_tuned_output(output, force=arguments.force)
    elif not is_libvirt:
        check_can_write(output, force=arguments.force)
    elif not arguments.force and output.is_file() and output.stat().st_size:
        # It may be the same domain, to which somebody has added disks since.
        raise UsageError(
            f"{output}: file exists, and a new domain would overwrite it",
            hint=f"{command_line('homenode', 'plan', output)} plans that file; --force "
            "overwrites it",
        )


def _reject_one_path(paths: Iterable[Path | None]) -> None:
    """Raise UsageError if a command would write two outputs to one file."""
    seen_paths: set[Path] = set()
    for path in paths:
        if path is None or path == STANDARD_OUTPUT:
            continue
        if path.resolve() in seen_paths:
            raise UsageError(
                f"{path}: two outputs for one file",
                hint="use a different file for each of -o, --save-plan and --svg",
            )
        seen_paths.add(path.resolve())


def check_tuned_output(path: Path | None, *, force: bool | None = None) -> None:
    """Raise UsageError if -o is a file with content that homenode did not tune. force:
    overwrite it; None without such an option."""
    if path is None or path == STANDARD_OUTPUT or force or not path.is_file():
        return
    if path.stat().st_size and not is_tuned_output(path):
        hint = "; --force saves it as the original of the new one" if force is not None else ""
        raise UsageError(
            f"{path}: file exists, without a saved original", hint=f"choose another name{hint}"
        )


# Host and layout.


def _plan(source: VmSource, arguments: PlanArguments) -> tuple[PlannedFile, tuple[str, ...]]:
    """Return (the plan and its file, the reasons for the layout)."""
    options, content, name = arguments.options, source.content, arguments.name
    if arguments.manual.node_pus:
        if content is None:
            raise UsageError("missing argument VM: --node-cpus needs a domain XML")
        _reject_with_ranges(arguments)
        reject_auto(options)
        return plan_manually(content, source.name, options, arguments.manual, copy_name=name), ()
    host = replace_versions(load_host(arguments.host, lspci=arguments.lspci), arguments)
    (host,) = apply_plans((host,), arguments.after)
    architecture = host.architecture
    if content is not None:
        vm = read_vm(content, source.name, source.target)
    elif source.target != LIBVIRT:
        vm = make_vm(options, architecture, check_name(name or DEFAULT_NAME))
    else:
        size = compute_options_size(options)
        new = make_domain(*size, architecture=architecture, name=name or DEFAULT_NAME)
        vm, name = read_vm(new, source.name), None
    vm = add_host_facts(vm, host)
    resolved_layout = resolve_layout(
        vm.guest,
        options,
        host,
        choose_by(arguments.results),
        expander_buses=has_feature(source.target, Feature.DEVICE_CELLS),
    )
    if source.target != LIBVIRT:
        output = None if arguments.output is None else arguments.output.name
        file = plan_for_target(vm, resolved_layout.options, host, source.target, output=output)
    else:
        assert vm.content is not None, "a new domain has a definition"
        file = plan_file(vm.content, vm.source, resolved_layout.options, host, copy_name=name)
    return file, resolved_layout.reasons


def _reject_with_ranges(arguments: PlanArguments) -> None:
    """Manual mode takes vCPUs and CPUs from the lists, and has no host to draw."""
    options = arguments.options
    for option, is_given in (
        ("--host", arguments.host is not None),
        ("--lspci", arguments.lspci is not None),
        ("--svg", arguments.svg is not None),
        ("--vcpus", options.vcpus is not None),
        ("--gpus", options.gpu_count is not None),
        ("--with-nics", options.with_nics),
        ("--with-nvswitches", options.with_nvswitches),
        ("--device UUID or gpuN", any(isinstance(device, str) for device in options.devices)),
        ("--ignore-domain", bool(options.replaces)),
        ("--after", bool(arguments.after)),
        ("--guest-node", bool(options.explicit_cells)),
    ):
        if is_given:
            raise exclusive("--node-cpus", option)


def replace_versions(host: "Host", arguments: PlanArguments) -> "Host":
    """Return the host with the versions of --libvirt and --qemu instead of those found."""
    settings = host.settings
    return replace(
        host,
        settings=replace(
            settings,
            libvirt_version=arguments.libvirt or settings.libvirt_version,
            qemu_version=arguments.qemu or settings.qemu_version,
        ),
    )


def apply_plans(hosts: "tuple[Host, ...]", plans: Sequence[Path]) -> "tuple[Host, ...]":
    """The hosts with the VMs of the saved plans of --after. Raises InputError, UsageError."""
    hint = "homenode plan --save-plan writes one"
    texts = [(str(path), read_input(path, "a saved plan", hint=hint)) for path in plans]
    saved_plans = [(source, read_plan(text, source)) for source, text in texts]
    return add_planned(hosts, saved_plans) if saved_plans else hosts


def choose_by(results: Sequence[str]) -> "Choose | None":
    """The function that chooses a layout by results instead of the table; None without results."""
    if not results:
        return None
    from homenode.decide.sentences import choose_by_results
    from homenode.measure.imported_files import load_sources

    return choose_by_results([run for source in load_sources(results) for run in source.runs])


def warn_slow_links(host: "Host | None", options: PlanOptions) -> None:
    """Warn about the host's slow links if homenode chooses the layout: they slow every layout."""
    if host is None or options.layout != AUTO:
        return
    from homenode.check.doctor.links import link_health
    from homenode.show.findings_text import find_shared_fix, format_subjects, group_findings

    for group in group_findings(link_health(host)):
        subjects, fact = (
            format_subjects(group),
            f"found {group[0].observed}, expected {group[0].expected}",
        )
        note(f"warning: {subjects}: {fact}; fix: {find_shared_fix(group)} ({group[0].id})")


# What is printed and written.


def print_refusal(error: Unplannable, *, as_json: bool = False, command: str = "plan") -> None:
    """Print every rejection: as text on standard error or as JSON on standard output."""
    if as_json:
        print_json(encode_refusal(error))
    else:
        from homenode.show.plan_text import format_refusal

        get_error_console().print(format_refusal(error, f"homenode {command}: "))


def _print(
    file: PlannedFile, reasons: Sequence[str], source: VmSource, arguments: PlanArguments
) -> None:
    is_libvirt = file.target == LIBVIRT
    if arguments.json:
        print_json(encode_plan(file.plan))
    elif arguments.quiet:
        note_critical(file.plan)
    else:
        from homenode.show.explain import explain

        outputs = (arguments.output, arguments.save_plan, arguments.svg)
        screen = get_error_console() if STANDARD_OUTPUT in outputs else make_console()
        step = f"the same command with -o tuned{_SUFFIXES[file.target]}"
        if arguments.output == STANDARD_OUTPUT:
            step = ""
        elif arguments.output is not None:
            step = _define_step(file, source, arguments)
        host = _choose_host(file, arguments)
        screen.print(
            explain(file.plan_to_show, host, reasons=reasons, step=step, full=arguments.explain)
        )
    if arguments.diff:
        before = (source.content or b"") if is_libvirt else file.original
        name = "tuned" if is_libvirt else file.target
        print_diff(before, file.document, source.name, str(arguments.output or name))


def _define_step(planned_file: PlannedFile, source: VmSource, arguments: PlanArguments) -> str:
    """Return the command that uses the written file, and the host to run it on if it is another."""
    from homenode.vm.targets.qm_conf import find_vmid

    output = arguments.output
    vmid = find_vmid(source.name) or find_vmid(str(output)) or "VMID"
    step = _STEPS[planned_file.target].format(command_line(str(output)), vmid)
    if planned_file.rendering.companions:
        step = f"copy the hook script, then {step}"
    if arguments.host is not None and planned_file.host is not None:
        return f"on {planned_file.host.name}: {step}"
    if source.domain is not None and planned_file.target == LIBVIRT:
        return command_line("homenode", "apply", source.domain, "--domain", output)
    return step


def _choose_host(planned_file: PlannedFile, arguments: PlanArguments) -> "Host | None":
    """The host without the domains that the VM replaces, which would be drawn on its CPUs."""
    host = planned_file.host
    if host is None or planned_file.target != LIBVIRT:
        return host
    return host.without_domains(arguments.options.replaces)


def note_critical(plan: Plan) -> None:
    """Print critical findings and unread VMs if the explanation is not printed."""
    from homenode.show.plan_text import format_finding_lines, format_unread, select_findings

    for line in format_finding_lines(select_findings(plan, Severity.CRITICAL)):
        note(f"critical: {line}")
    for line in format_unread(plan):
        note(f"warning: not read: {line}")


def _write(planned: PlannedFile, source: VmSource, arguments: PlanArguments) -> list[str]:
    """Write the files; return the lines on them."""
    lines = []
    if arguments.output is not None:
        original = source.content if planned.target == LIBVIRT else planned.original or None
        mode = choose_permissions(source.name)
        lines += write_definition(planned, original, arguments.output, mode)
    lines += planned.notes
    if arguments.save_plan is not None:
        write_text(arguments.save_plan, encode_plan(planned.plan))
    if arguments.svg is not None:
        host = _choose_host(planned, arguments)
        assert host is not None, "--svg was rejected for manual mode before"
        from homenode.show.topology_map import draw_topology

        write_text(arguments.svg, draw_topology(host, planned.plan))
    files = (arguments.save_plan, arguments.svg)
    return [*lines, *(f"wrote {file}" for file in files if file not in (None, STANDARD_OUTPUT))]


def write_definition(
    planned_file: PlannedFile, original: bytes | None, output: Path, mode: int
) -> list[str]:
    """Write the file with its scripts, and its original next to it; or the file to standard output.
    Return the lines on it. A domain document is checked against libvirt's schema, if it is
    installed. original: None = a new file."""
    document, lines = planned_file.document, []
    if planned_file.target == LIBVIRT:
        gap = reject_new_errors(planned_file.original, document, planned_file.libvirt)
        lines = [] if gap is None else [f"not checked: {gap}"]
    if output == STANDARD_OUTPUT:
        print_document(document)
        return lines
    for suffix, content in planned_file.rendering.companions:
        script = output.with_name(output.name + suffix)
        write_bytes(script, content, SCRIPT_MODE)
        lines.append(f"wrote {script}")
    if original is None:
        write_bytes(output, document, SCRIPT_MODE if document.startswith(b"#!") else None)
        return [*lines, f"wrote {output}"]
    scripts = {f"{output.name}{suffix}": text for suffix, text in planned_file.rendering.companions}
    saved = write_tuned(output, original, document, mode, scripts)
    return [
        *lines,
        f"wrote {saved.output} (original in {saved.original}; homenode restore undoes it)",
    ]
