"""homenode plan: for libvirt, by planning, or written for another hypervisor. [I/O]"""

from pathlib import Path
from typing import TYPE_CHECKING

from homenode.cli import planning
from homenode.cli.arguments.place import PlanArguments
from homenode.cli.terminal import (
    STANDARD_OUTPUT,
    check_can_write,
    note,
    permissions_of,
    print_diff,
    print_document,
    print_json,
    write_bytes,
)
from homenode.errors import FINDINGS, UsageError
from homenode.plan.auto import resolve_layout
from homenode.plan.stored import encode_plan
from homenode.plan.vm_file import (
    TargetPlan,
    kind_of,
    on_host,
    plan_for_target,
    read_vm,
    vm_of_options,
)
from homenode.vm.domain.copy import DEFAULT_NAME, check_name
from homenode.vm.domain.restore import write_tuned
from homenode.vm.plan_model import LIBVIRT, Plan, Unplannable, is_critical
from homenode.vm.plan_options import refuse_objective
from homenode.vm.sources import load_host
from homenode.vm.targets.registry import TARGETS
from homenode.wording import did_you_mean

if TYPE_CHECKING:
    from homenode.machine.topology import Host

SCRIPT_MODE = 0o755


def refuse_unknown_target(target: str) -> None:
    """Raises UsageError for a name that is no target's."""
    known: tuple[str, ...] = (LIBVIRT, *TARGETS)
    if target not in known:
        raise UsageError(
            f"--target: expected {', '.join(known)}, found {target!r}",
            hint=did_you_mean(target, known) or None,
        )


def is_for_libvirt(original: bytes | None, document: str, target: str | None) -> bool:
    """Whether a plan goes into a domain document, or a new one. Raises UsageError for a target that
    is none."""
    if target is not None:
        refuse_unknown_target(target)
    if target not in (None, LIBVIRT) or original is None:
        return target in (None, LIBVIRT)
    kind = kind_of(original, document)
    if target == LIBVIRT and kind != LIBVIRT:
        raise UsageError(
            f"--target libvirt: expected a domain document to write the plan into, found {kind}'s "
            "file",
            hint="virsh dumpxml --inactive NAME > VM.xml; or leave the file out, and --vcpus, "
            "--memory and --gpus make a new domain",
        )
    return kind == LIBVIRT


def run(
    original: bytes | None,
    document: str,
    asked: PlanArguments,
) -> Plan:
    """Plan, print and write. Nothing is written unless everything before succeeded."""
    if asked.manual.node_pus:
        raise UsageError("--node-cpus: expected a domain document, found --target or another file")
    if asked.name is not None and original is not None:
        raise UsageError("--name: expected a domain document to copy, found --target")
    try:
        host, planned, why = _planned(original, document, asked)
    except Unplannable as error:
        planning.say_why_not(error, as_json=asked.json)
        raise SystemExit(error.exit_code) from None
    notes = _write(planned, host, document, asked)
    _print(planned, why, host, document, asked)
    for line in notes:
        note(line)
    return planned.plan


def _planned(
    original: bytes | None,
    document: str,
    asked: PlanArguments,
) -> "tuple[Host, TargetPlan, tuple[str, ...]]":
    names = asked.hosts or (None,)
    if len(names) > 1 and (asked.lspci is not None or asked.options.replaces):
        raise UsageError("--lspci, --ignore-domain: expected one --host, found several")
    hosts = planning.hosts_after(
        tuple(planning.with_versions(load_host(name, lspci=asked.lspci), asked) for name in names),
        asked.after,
    )
    vm = (
        vm_of_options(asked.options, hosts[0].architecture, check_name(asked.name or DEFAULT_NAME))
        if original is None
        else read_vm(original, document, asked.target)
    )
    target = asked.target or vm.kind
    assert target is not None, "without a file and a target it is libvirt's"
    choose = planning.choose_by(asked.results)
    best = hosts[0]
    if len(hosts) > 1:
        best = planning.best_of(vm.guest, hosts, choose, asked)
    vm = on_host(vm, best)
    planning.note_sick_links(best, asked.options)
    chosen = resolve_layout(vm.guest, asked.options, best, choose)
    planned = plan_for_target(vm, chosen.options, best, target, asked.target_version)
    return best, planned, chosen.why


def _print(
    planned: TargetPlan,
    why: tuple[str, ...],
    host: "Host",
    document: str,
    asked: PlanArguments,
) -> None:
    if asked.json:
        print_json(encode_plan(planned.plan))
    elif not asked.quiet:
        planning.print_explanation(planned.plan, why, host, asked)
    else:
        planning.note_critical(planned.plan)
    if asked.diff:
        shown = str(asked.output or planned.target)
        print_diff(planned.given or b"", planned.rendering.document, document, shown)


def _write(planned: TargetPlan, host: "Host", document: str, asked: PlanArguments) -> list[str]:
    """Write what is wanted; what to say of it, once the explanation is printed."""
    lines = []
    if asked.output == STANDARD_OUTPUT:
        print_document(planned.rendering.document)
    elif asked.output is not None:
        lines += _write_files(planned, asked.output, document, asked)
    for finding in planned.findings:
        fix = "" if finding.fix is None else f"; {finding.fix}"
        lines.append(
            f"{finding.severity}: {finding.subject}: {finding.compared}{fix} ({finding.id})"
        )
    return [*lines, *planning.write_plan_files(planned.plan, host, asked)]


def _write_files(
    planned: TargetPlan, output: Path, document: str, asked: PlanArguments
) -> list[str]:
    rendering = planned.rendering
    companions = [output.with_name(output.name + suffix) for suffix, _ in rendering.companions]
    check_can_write(*companions, force=asked.force)
    planning.refuse_one_path((output, *companions, asked.save_plan, asked.svg))
    if planned.given is None:
        check_can_write(output, force=asked.force)
    else:
        planning.check_tuned_output(document, asked.output, force=asked.force)
    for path, (_, content) in zip(companions, rendering.companions, strict=True):
        write_bytes(path, content, SCRIPT_MODE)
    lines = [f"wrote {path}" for path in companions]
    if planned.given is not None:
        saved = write_tuned(output, planned.given, rendering.document, permissions_of(document))
        return [*lines, planning.written(saved)]
    is_script = rendering.document.startswith(b"#!")
    write_bytes(output, rendering.document, SCRIPT_MODE if is_script else None)
    return [*lines, f"wrote {output}"]


def plan(asked: PlanArguments) -> None:
    """Plan, write and print as it is asked."""
    if asked.document is not None and asked.vm_file is not None:
        raise UsageError("give either --vm or a VM file, not both")
    refuse_objective(asked.options)
    original, source = planning.read_original(asked)
    if is_for_libvirt(original, source, asked.target):
        if asked.target_version is not None:
            raise UsageError("--target-version: expected a --target, found libvirt: use --libvirt")
        made = planning.tune_and_write(original, source, asked).plan
    else:
        made = run(original, source, asked)
    if is_critical(made):
        raise SystemExit(FINDINGS)
