"""homenode verify: does a document, a booted guest or the real one match its plan. [I/O]"""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from msgspec import structs

from homenode.check.metrics import prometheus
from homenode.check.verify.boot.stand_in_boot import BootOptions
from homenode.check.verify.guest.checks import Check
from homenode.check.verify.verification import Verified, VerifyRequest
from homenode.check.verify.verification import verify as verify_wanted
from homenode.cli.arguments.check import VerifyArguments
from homenode.cli.terminal import (
    check_can_ask,
    check_can_write,
    confirm,
    exit_by,
    interruptible,
    note,
    print_file,
    print_findings,
    working,
    write_text,
)
from homenode.errors import FINDINGS, UsageError
from homenode.findings import Findings, Severity, are_bad, in_order
from homenode.machine.topology import Host
from homenode.plan.stored import read_plan
from homenode.safe.input_files import read_input
from homenode.text import command_line
from homenode.vm.daemon_host import (
    load_daemon_host,
    refuse_plan_for_other,
    refuse_tuned_for_other,
)
from homenode.vm.domain.read import read_vm
from homenode.vm.hypervisor.connection import DEFAULT
from homenode.vm.hypervisor.virsh import Virsh
from homenode.vm.plan import Plan
from homenode.vm.sources import names_domain


class Rule(NamedTuple):
    """An option: the others of which it needs one, those that it excludes, and a right command."""

    field: str
    needs: tuple[str, ...]
    excludes: tuple[str, ...]
    command: str


_APART = ("lspci", "boot", "guest", "target")
_OF_TARGET = "homenode verify --plan P.json --guest SOURCE --target NAME"
_OF_BOOT = "homenode verify VM.xml --boot"
RULES = (
    Rule("live", (), ("document", "start", "svg", *_APART), "homenode verify --live NAME"),
    Rule("start", ("document",), _APART, "homenode verify NAME --start"),
    Rule("boot", ("document",), (), _OF_BOOT),
    Rule("guest", ("document", "plan"), (), "homenode verify VM.xml --guest ssh:HOST"),
    Rule("target", ("guest",), ("document",), _OF_TARGET),
    Rule("target", ("plan",), (), _OF_TARGET),
    *(Rule(field, ("boot",), (), _OF_BOOT) for field in ("kernel", "timeout", "keep")),
    *(
        Rule(field, ("guest",), (), "homenode verify VM.xml --guest ssh:HOST --ssh-user USER")
        for field in ("ssh_user", "ssh_key")
    ),
    Rule("json", (), ("prometheus",), "homenode verify VM.xml --json"),
)


def check_rules(asked: VerifyArguments) -> None:
    """Raise UsageError for an option without what it needs, or with what it excludes."""
    given = {name for name in asked.__struct_fields__ if getattr(asked, name) not in (None, False)}
    if given.isdisjoint(("document", "guest", "live")):
        raise UsageError(
            "missing argument VM",
            hint="homenode verify VM.xml, or homenode verify --plan P.json --guest ssh:HOST",
        )
    for rule in RULES:
        if rule.field not in given:
            continue
        if clash := [name for name in rule.excludes if name in given]:
            raise UsageError(
                f"{_typed([rule.field])}: not together with {_typed(clash)}", hint=rule.command
            )
        if rule.needs and given.isdisjoint(rule.needs):
            raise UsageError(
                f"{_typed([rule.field])}: missing {_typed(rule.needs)}", hint=rule.command
            )


def _typed(fields: Iterable[str]) -> str:
    return " or ".join(
        "VM" if field == "document" else f"--{field.replace('_', '-')}" for field in fields
    )


def verify(asked: VerifyArguments) -> None:
    """Check what is asked, and print the findings."""
    target = asked.target
    if target is not None:
        from homenode.cli.plan import refuse_unknown_target
        from homenode.vm.plan import LIBVIRT

        refuse_unknown_target(target)
        target = None if target == LIBVIRT else target
    check_rules(structs.replace(asked, target=target))
    if asked.live is not None:
        _verify_live(asked.live, asked)
        return

    check_can_write(asked.svg)
    options = (
        BootOptions(asked.connect, asked.kernel, asked.timeout, asked.keep) if asked.boot else None
    )
    is_domain = asked.document is not None and names_domain(str(asked.document))
    wanted = VerifyRequest(
        document=None if is_domain else asked.document,
        domain=str(asked.document) if is_domain else None,
        connect=DEFAULT if asked.connect in (None, "none") else asked.connect,
        plan=asked.plan,
        host=asked.host,
        lspci=asked.lspci,
        boot=options,
        guest=asked.guest,
        ssh_options=(
            *(() if asked.ssh_user is None else ("-l", asked.ssh_user)),
            *(() if asked.ssh_key is None else ("-i", str(asked.ssh_key.absolute()))),
        ),
        target=target,
    )
    if asked.start and not is_domain:
        raise UsageError(
            "--start: missing the name of a domain", hint="homenode verify NAME --start"
        )
    if asked.connect is not None and not (asked.boot or is_domain):
        raise UsageError("--connect: missing the name of a domain, or --boot", hint=_OF_BOOT)
    if asked.start:
        check_can_ask(asked=not asked.yes, has_dry_run=False)
        _check_host(asked)
    # Interruptible, since a test guest would run on.
    with interruptible(), working("booting a test guest" if asked.boot else "checking"):
        verified = verify_wanted(wanted)
    if asked.start:
        verified = _started(verified, wanted, yes=asked.yes)
    _print(verified, asked)
    if asked.svg is not None:
        _draw(verified, asked.svg)
    exit_by(verified.findings)


def _host_and_plan(asked: VerifyArguments, virsh: Virsh) -> tuple[Host, Plan | None]:
    """The daemon's host, and the saved plan for it. Raises InputError where --host or the plan is
    for another."""
    here = load_daemon_host(asked.host, virsh)
    if asked.plan is None:
        return here, None
    content = read_input(asked.plan, "a saved plan", hint="homenode plan --save-plan P.json")
    plan = read_plan(content, str(asked.plan))
    refuse_plan_for_other(plan, here)
    return here, plan


def _check_host(asked: VerifyArguments) -> None:
    """Raise InputError if the VM to start, or the plan, is for another host than the daemon's."""
    virsh = Virsh(asked.connect or DEFAULT)
    here, _ = _host_and_plan(asked, virsh)
    state = virsh.domain(str(asked.document))
    refuse_tuned_for_other(read_vm(virsh.definition(state.uuid), state.name), here)


def _started(verified: Verified, wanted: VerifyRequest, *, yes: bool) -> Verified:
    """With what the VM shows when it is started paused; as it was where it could not start."""
    from homenode.change.host_lock import host_locked
    from homenode.change.journal import default_root
    from homenode.check.verify.start import startable, verify_paused
    from homenode.cli.restore import changing_host

    assert wanted.domain is not None, "only a domain is started"
    look = startable(wanted.connect, wanted.domain)
    name, before = look.state.name, verified.findings
    if not yes and not confirm(
        f"Start {name} paused, with its real devices and libvirt's hooks, and end it at once?"
    ):
        raise SystemExit(FINDINGS)
    root = default_root()
    with (
        changing_host("verify", (name, "--start"), wanted.connect),
        host_locked(root, wanted.connect, "homenode verify --start") as locks,
        interruptible(),
        working(f"starting {name} paused"),
    ):
        seen = verify_paused(look, verified.plan, verified.host, locks)
    findings = structs.replace(
        before,
        checked=(*before.checked, *seen.checked),
        findings=in_order([*before.findings, *seen.findings]),
    )
    return structs.replace(verified, findings=findings)


def _print(verified: Verified, asked: VerifyArguments) -> None:
    findings, subject = verified.findings, _subject(asked)
    if asked.prometheus:
        print_file(prometheus(findings, {"domain": str(asked.document)}))
        return
    from homenode.show.findings_text import checks_table, counts_text

    plan, checks = verified.plan, [check for view in verified.views for check in view.checks]
    answer, labels = None, {"test guest": verified.how}
    if checks:
        against = "its definition" if plan is None else "the plan"
        place = "in a test guest" if verified.how else "by its guest's own view"
        answer = f"{subject} matches {against} {place}: {counts_text(checks)}"
        equal = sum(check.finding is None for check in checks)
        labels["equal"] = (
            f"{equal} facts" if are_bad(f for v in verified.views for f in v.findings) else ""
        )
        findings = findings if asked.json else _beside(findings, checks)
    elif plan is not None:
        layout = f"layout {plan.layout.name} on {plan.host_name}"
        answer = f"{subject} matches the plan: {layout}, 0 differences"
        labels["next"] = _boot_command(asked)
    print_findings(
        findings,
        subject,
        as_json=asked.json,
        answer=answer,
        explain=asked.explain,
        table=checks_table(checks, explain=asked.explain) if checks else (),
        labels=labels,
    )


def _beside(findings: Findings, checks: Sequence[Check]) -> Findings:
    """The findings without what is unknown of the guest, which the table has."""
    shown = {check.finding.id for check in checks if check.finding is not None}
    return structs.replace(
        findings,
        findings=tuple(
            finding
            for finding in findings.findings
            if finding.severity is not Severity.INCONCLUSIVE or finding.id not in shown
        ),
    )


def _subject(asked: VerifyArguments) -> str:
    return "the guest" if asked.document is None else asked.document.name


def _boot_command(asked: VerifyArguments) -> str:
    """The command of the next proof; "" for what no test guest is booted for."""
    if asked.document is None or asked.start:
        return ""
    plan = () if asked.plan is None else ("--plan", asked.plan)
    host = () if asked.host is None else ("--host", asked.host)
    return command_line("homenode", "verify", asked.document, *plan, *host, "--boot")


def _draw(verified: Verified, svg: Path) -> None:
    from homenode.show.topology_map import topology_map

    for number, guest in enumerate(verified.guests):
        path = svg if number == 0 else svg.with_name(f"{svg.stem}-{number + 1}{svg.suffix}")
        write_text(path, topology_map(guest))
        note(f"wrote {path}")
    if not verified.guests:
        note("no guest to draw: --boot or --guest gives one")
    if verified.host is not None and verified.plan is not None:
        path = svg.with_name(f"{svg.stem}-plan{svg.suffix}")
        write_text(path, topology_map(verified.host, verified.plan))
        note(f"wrote {path}")


def _verify_live(name: str, asked: VerifyArguments) -> None:
    """Print the findings on a running domain of this machine; exit 1 where there are bad ones.

    Raises as verify_running_domain, and InputError for a plan that was made for another host.
    """
    from homenode.check.verify.live.capture import verify_running_domain

    connect, made = asked.connect or DEFAULT, None
    if asked.plan is not None or asked.host is not None:
        _, made = _host_and_plan(asked, Virsh(connect))
    findings = verify_running_domain(name, connect, made)
    if asked.prometheus:
        print_file(prometheus(findings, {"domain": name}))
    else:
        print_findings(findings, name, as_json=asked.json, explain=asked.explain)
    exit_by(findings)
