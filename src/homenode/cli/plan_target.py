"""What `homenode plan --target` does: a plan written for another hypervisor than libvirt. [I/O]"""

from pathlib import Path
from typing import TYPE_CHECKING

from homenode.cli import planning
from homenode.cli.placing_options import hosts_after
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
from homenode.errors import UsageError
from homenode.plan.model import Unplannable, is_critical
from homenode.plan.options import PlanOptions
from homenode.targets.planned import TargetPlan, plan_for_target
from homenode.targets.target import TARGETS
from homenode.targets.vm_file import LIBVIRT, kind_of, on_host, read_vm, vm_of_options

if TYPE_CHECKING:
    from homenode.analyse.verdict import Verdict
    from homenode.topology import Host

SCRIPT_MODE = 0o755


def is_for_libvirt(original: bytes | None, document: str, target: str | None) -> bool:
    """Whether a plan goes into a domain document. Raises UsageError for a target that is none."""
    if target is not None and target not in (LIBVIRT, *TARGETS):
        raise UsageError(
            f"--target: expected {', '.join((LIBVIRT, *TARGETS))}, found {target!r}",
        )
    if target == LIBVIRT and (original is None or kind_of(original, document) != LIBVIRT):
        raise UsageError(
            "--target libvirt: expected a domain document to write the plan into, found none",
            hint="virsh dumpxml --inactive NAME > VM.xml, or choose another target",
        )
    if target in (None, LIBVIRT):
        return original is not None and (
            target == LIBVIRT or kind_of(original, document) == LIBVIRT
        )
    return False


def run(
    original: bytes | None,
    document: str,
    options: PlanOptions,
    sources: planning.Sources,
    outputs: planning.Outputs,
) -> None:
    """Plan, print and write. Nothing is written unless everything before succeeded."""
    if sources.ranges is not None:
        raise UsageError("--node-pus: expected a domain document, found --target or another file")
    if outputs.copy_name is not None:
        raise UsageError("--name: expected a domain document to copy, found --target")
    try:
        host, planned, verdict = _planned(original, document, options, sources, outputs)
    except Unplannable as error:
        planning.say_why_not(error, as_json=outputs.json)
        raise SystemExit(error.exit_code) from None
    _print(planned, verdict, host, document, outputs)
    _write(planned, host, document, outputs)
    if is_critical(planned.plan):
        raise SystemExit(1)


def _planned(
    original: bytes | None,
    document: str,
    options: PlanOptions,
    sources: planning.Sources,
    outputs: planning.Outputs,
) -> "tuple[Host, TargetPlan, Verdict | None]":
    from homenode.auto_layout import settled
    from homenode.evidence.sources import load_evidence
    from homenode.sources import load_host

    names = sources.hosts or (None,)
    if len(names) > 1 and (sources.lspci is not None or options.replaces):
        raise UsageError("--lspci, --replaces: expected one --host, found several")
    hosts = hosts_after(
        tuple(sources.with_versions(load_host(name, lspci=sources.lspci)) for name in names),
        sources.after,
    )
    vm = (
        vm_of_options(options, hosts[0].architecture)
        if original is None
        else read_vm(original, document)
    )
    target = outputs.target or (vm.kind if vm.kind != LIBVIRT else None)
    if target is None:
        raise UsageError(
            f"--target: expected one of {', '.join(TARGETS)} where no file says which, found none"
        )
    evidence = load_evidence(sources.results)
    best = hosts[0]
    if len(hosts) > 1:
        best = planning.best_of(vm.guest, options, hosts, evidence, outputs)
    vm = on_host(vm, best)
    chosen = settled(vm.guest, options, best, evidence)
    planned = plan_for_target(vm, chosen.options, best, target)
    return best, planned, chosen.verdict


def _print(
    planned: TargetPlan,
    verdict: "Verdict | None",
    host: "Host",
    document: str,
    outputs: planning.Outputs,
) -> None:
    if outputs.json:
        from homenode.plan.stored import encode_plan

        print_json(encode_plan(planned.plan))
    elif not outputs.quiet:
        planning.print_explanation(planned.plan, verdict, host, outputs)
    if outputs.diff:
        shown = str(outputs.document or planned.target)
        print_diff(planned.given or b"", planned.rendering.document, document, shown)


def _write(planned: TargetPlan, host: "Host", document: str, outputs: planning.Outputs) -> None:
    if outputs.document == STANDARD_OUTPUT:
        print_document(planned.rendering.document)
    elif outputs.document is not None:
        _write_files(planned, outputs.document, document, outputs)
    for finding in planned.findings:
        fix = "" if finding.fix is None else f"; {finding.fix}"
        note(f"{finding.severity}: {finding.subject}: {finding.detail}{fix} ({finding.id})")
    planning.write_plan_files(planned.plan, host, outputs)


def _write_files(
    planned: TargetPlan, output: Path, document: str, outputs: planning.Outputs
) -> None:
    from homenode.domain.restore import write_tuned

    rendering = planned.rendering
    companions = [output.with_name(output.name + suffix) for suffix, _ in rendering.companions]
    check_can_write(*companions, force=outputs.force)
    if planned.given is None:
        check_can_write(output, force=outputs.force)
    else:
        planning.check_tuned_output(document, outputs.document, force=outputs.force)
    for path, (_, content) in zip(companions, rendering.companions, strict=True):
        write_bytes(path, content, SCRIPT_MODE)
        note(f"wrote {path}")
    if planned.given is not None:
        saved = write_tuned(output, planned.given, rendering.document, permissions_of(document))
        note(f"wrote {saved.output} (original in {saved.original}; homenode restore undoes it)")
        return
    is_script = rendering.document.startswith(b"#!")
    write_bytes(output, rendering.document, SCRIPT_MODE if is_script else None)
    note(f"wrote {output}")
