"""homenode verify: compare a definition, a test guest or the real guest with the plan. [I/O]"""

import sys
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from msgspec import structs

from homenode.check.verify.boot.stand_in_boot import BootOptions
from homenode.check.verify.guest_checks import Check
from homenode.check.verify.verification import Verification, VerifyRequest
from homenode.check.verify.verification import verify as verify_wanted
from homenode.cli.arguments.check import VerifyArguments
from homenode.cli.terminal import (
    ask,
    exit_by,
    interruptible,
    is_interactive,
    note,
    print_file,
    print_findings,
    working,
)
from homenode.errors import UsageError, exclusive, requires
from homenode.findings import Call, Findings, Severity, are_bad, sort_findings, with_call
from homenode.machine.topology import Host
from homenode.plan.stored import read_plan
from homenode.safe.input_files import read_input
from homenode.show.findings_text import format_prometheus
from homenode.text import command_line
from homenode.vm.domain.read import read_vm
from homenode.vm.host_sources import (
    load_daemon_host,
    reject_plan_for_other,
    reject_tuned_for_other,
)
from homenode.vm.hypervisor.connection import DEFAULT
from homenode.vm.hypervisor.virsh import Virsh
from homenode.vm.plan import LIBVIRT, Plan
from homenode.vm.sources import names_domain
from homenode.vm.targets.registry import find_target


class OptionRule(NamedTuple):
    """Rule of an option: the options of which it needs one, those that it excludes, and an
    example."""

    field: str
    needs: tuple[str, ...]
    excludes: tuple[str, ...]
    command: str


_APART = ("lspci", "boot", "guest", "target")
_OF_TARGET = "homenode verify --plan P.json --guest SOURCE --target NAME"
_OF_BOOT = "homenode verify VM.xml --boot"
RULES = (
    OptionRule("live", (), ("document", "start", *_APART), "homenode verify --live NAME"),
    OptionRule("start", ("document",), _APART, "homenode verify NAME --start"),
    OptionRule("boot", ("document",), (), _OF_BOOT),
    OptionRule("guest", ("document", "plan"), (), "homenode verify VM.xml --guest ssh:HOST"),
    OptionRule("target", ("guest",), ("document",), _OF_TARGET),
    OptionRule("target", ("plan",), (), _OF_TARGET),
    *(OptionRule(field, ("boot",), (), _OF_BOOT) for field in ("kernel", "timeout", "keep")),
    OptionRule("json", (), ("prometheus",), "homenode verify VM.xml --json"),
)


def check_rules(arguments: VerifyArguments) -> None:
    """Raise UsageError for an option without a required one, or with an excluded one."""
    typed_names = {
        name
        for name in arguments.__struct_fields__
        if getattr(arguments, name) not in (None, False)
    }
    if typed_names.isdisjoint(("document", "guest", "live")):
        raise UsageError(
            "missing argument VM",
            hint="homenode verify VM.xml, or homenode verify --plan P.json --guest ssh:HOST",
        )
    for rule in RULES:
        if rule.field not in typed_names:
            continue
        if clash := [name for name in rule.excludes if name in typed_names]:
            raise exclusive(_format_options([rule.field]), _format_options(clash), rule.command)
        if rule.needs and typed_names.isdisjoint(rule.needs):
            raise requires(_format_options([rule.field]), _format_options(rule.needs), rule.command)


def _format_options(fields: Iterable[str]) -> str:
    return " or ".join(
        "VM" if field == "document" else f"--{field.replace('_', '-')}" for field in fields
    )


def verify(arguments: VerifyArguments) -> None:
    """Run the requested checks, and print the findings."""
    target = arguments.target
    if target is not None:
        from homenode.cli.plan import reject_unknown_target
        from homenode.vm.plan import LIBVIRT

        reject_unknown_target(target)
        target = None if target == LIBVIRT else target
    check_rules(structs.replace(arguments, target=target))
    if arguments.live is not None:
        _verify_live(arguments.live, arguments)
        return

    options = (
        BootOptions(arguments.connect, arguments.kernel, arguments.timeout, arguments.keep)
        if arguments.boot
        else None
    )
    is_domain = arguments.document is not None and names_domain(str(arguments.document))
    request = VerifyRequest(
        document=None if is_domain else arguments.document,
        domain=str(arguments.document) if is_domain else None,
        connect=DEFAULT if arguments.connect in (None, "none") else arguments.connect,
        plan=arguments.plan,
        host=arguments.host,
        lspci=arguments.lspci,
        boot=options,
        guest=arguments.guest,
        target=target,
    )
    if arguments.start and not is_domain:
        raise UsageError(
            "--start: missing the name of a domain", hint="homenode verify NAME --start"
        )
    if arguments.connect is not None and not (arguments.boot or is_domain):
        raise UsageError("--connect: missing the name of a domain, or --boot", hint=_OF_BOOT)
    if arguments.start:
        if not arguments.yes and not is_interactive():
            raise UsageError(
                "not a terminal; nothing was started",
                hint=command_line("homenode", "verify", arguments.document, "--start", "--yes"),
            )
        _check_host(arguments)
    if arguments.boot and not sys.stderr.isatty():
        note("booting a test guest, which takes minutes without KVM")
    # Interruptible, since a test guest would run on.
    with interruptible(), working("booting a test guest" if arguments.boot else "checking"):
        verification = verify_wanted(request)
    if arguments.start:
        verification = _start_paused(verification, request, yes=arguments.yes)
    _print(verification, arguments)
    exit_by(verification.findings)


def _read_host_and_plan(arguments: VerifyArguments, virsh: Virsh) -> tuple[Host, Plan | None]:
    """Return the daemon's host and the saved plan. Raises InputError if one is for another host."""
    host = load_daemon_host(arguments.host, virsh)
    if arguments.plan is None:
        return host, None
    content = read_input(arguments.plan, "a saved plan", hint="homenode plan --save-plan P.json")
    plan = read_plan(content, str(arguments.plan))
    reject_plan_for_other(plan, host)
    return host, plan


def _check_host(arguments: VerifyArguments) -> None:
    """Raise InputError if the VM to start, or the plan, is for another host than the daemon's."""
    virsh = Virsh(arguments.connect or DEFAULT)
    host, _ = _read_host_and_plan(arguments, virsh)
    state = virsh.find_domain(str(arguments.document))
    reject_tuned_for_other(read_vm(virsh.read_definition(state.uuid), state.name), host)


def _start_paused(verification: Verification, request: VerifyRequest, *, yes: bool) -> Verification:
    """Add the result of a paused start; unchanged if the VM could not start."""
    from homenode.check.verify.start import find_startable, verify_paused
    from homenode.cli.restore import changing_host

    assert request.domain is not None, "only a domain is started"
    look = find_startable(request.connect, request.domain)
    name, before = look.state.name, verification.findings
    if not yes:
        ask(f"Start {name} paused, with its real devices and libvirt's hooks, and end it at once?")
    with (
        changing_host("verify", (name, "--start"), request.connect) as locks,
        interruptible(),
        working(f"starting {name} paused"),
    ):
        start_result = verify_paused(look, verification.plan, verification.host, locks)
    findings = structs.replace(
        before,
        checked=(*before.checked, *start_result.checked),
        findings=sort_findings([*before.findings, *start_result.findings]),
    )
    return structs.replace(verification, findings=findings)


def _print(verified: Verification, arguments: VerifyArguments) -> None:
    findings = verified.findings
    if arguments.document is not None:
        named_findings = with_call(findings.findings, _call_of_vm(arguments))
        findings = structs.replace(findings, findings=named_findings)
    subject = "the guest" if arguments.document is None else arguments.document.name
    if arguments.prometheus:
        print_file(format_prometheus(findings, {"domain": str(arguments.document)}))
        return
    from homenode.show.findings_text import build_checks_table, format_counts

    plan, checks = verified.plan, [check for view in verified.views for check in view.checks]
    answer, labels = None, {"test guest": verified.how}
    if checks:
        source = "its definition" if plan is None else "the plan"
        place = "in a test guest" if verified.how else "by its guest's own view"
        answer = f"{subject} matches {source} {place}: {format_counts(checks)}"
        equal_count = sum(check.finding is None for check in checks)
        labels["equal"] = (
            f"{equal_count} facts" if are_bad(f for v in verified.views for f in v.findings) else ""
        )
        findings = findings if arguments.json else _drop_table_rows(findings, checks)
    elif plan is not None:
        layout = f"layout {plan.layout.name} on {plan.host_name}"
        answer = f"{subject} matches the plan: {layout}, 0 differences"
        labels["next"] = "" if are_bad(findings.findings) else _format_next_command(arguments, plan)
    print_findings(
        findings,
        subject,
        as_json=arguments.json,
        answer=answer,
        explain=arguments.explain,
        table=build_checks_table(checks, explain=arguments.explain) if checks else (),
        labels=labels,
    )


def _drop_table_rows(findings: Findings, checks: Sequence[Check]) -> Findings:
    """Return the findings without unknown facts of the guest, which the table has."""
    shown_ids = {check.finding.id for check in checks if check.finding is not None}
    return structs.replace(
        findings,
        findings=tuple(
            finding
            for finding in findings.findings
            if finding.severity is not Severity.INCONCLUSIVE or finding.id not in shown_ids
        ),
    )


def _format_next_command(arguments: VerifyArguments, plan: Plan) -> str:
    """Return the command that boots a test guest, or compares the guest of a target for which none
    boots; "" after either."""
    if arguments.document is None or arguments.start:
        return ""
    target = plan.kept_of
    if target != LIBVIRT and find_target(target).words_of is None:
        words = f"--target {target} --guest ssh:HOST".split()
        return command_line("homenode", "verify", "--plan", arguments.plan, *words)
    call = (word for words in _call_of_vm(arguments) for word in words)
    return command_line("homenode", "verify", *call, "--boot")


def _call_of_vm(arguments: VerifyArguments) -> Call:
    """Return the words of the user's command that name the VM, its plan and its host."""
    options = {"--plan": arguments.plan, "--host": arguments.host, "--lspci": arguments.lspci}
    given_options = [(name, str(value)) for name, value in options.items() if value is not None]
    return [(str(arguments.document),), *given_options]


def _verify_live(name: str, arguments: VerifyArguments) -> None:
    """Print the findings on a running domain of this machine; exit 1 for critical findings or
    warnings.

    Raises like verify_running_domain, and InputError for a plan that was made for another host.
    """
    from homenode.check.verify.live.capture import verify_running_domain

    connect, plan = arguments.connect or DEFAULT, None
    if arguments.plan is not None or arguments.host is not None:
        _, plan = _read_host_and_plan(arguments, Virsh(connect))
    findings = verify_running_domain(name, connect, plan)
    named_findings = with_call(findings.findings, [(name,)])
    findings = structs.replace(findings, findings=named_findings)
    if arguments.prometheus:
        print_file(format_prometheus(findings, {"domain": name}))
    else:
        print_findings(findings, name, as_json=arguments.json, explain=arguments.explain)
    exit_by(findings)
