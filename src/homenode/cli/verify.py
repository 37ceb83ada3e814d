"""homenode verify: does a document, a booted guest or the real one match its plan. [I/O]"""

from pathlib import Path

from msgspec import structs

from homenode.check.metrics import prometheus
from homenode.check.verify.boot.stand_in_boot import BootOptions
from homenode.check.verify.verification import Verified, VerifyRequest
from homenode.check.verify.verification import verify as verify_wanted
from homenode.cli.arguments.check import VerifyArguments
from homenode.cli.terminal import (
    check_can_ask,
    check_can_write,
    confirm,
    console,
    exit_by,
    interruptible,
    note,
    print_file,
    print_findings,
    working,
    write_text,
)
from homenode.errors import FINDINGS, UsageError
from homenode.findings import Findings, in_order
from homenode.safe.input_files import read_input
from homenode.vm.hypervisor.connection import DEFAULT
from homenode.vm.sources import load_host, names_domain


def verify(asked: VerifyArguments) -> None:
    """Check what is asked, and print the findings."""
    _refuse_idle(asked)
    if asked.json and asked.prometheus:
        raise UsageError("give either --json or --prometheus, not both")
    target = asked.target
    if asked.live is not None:
        if asked.boot or any(
            one is not None
            for one in (asked.document, asked.guest, asked.host, asked.lspci, target)
        ):
            raise UsageError(
                "--live: expected no document, --host, --lspci, --boot, --guest or --target: a "
                "running domain is checked where it runs"
            )

        _verify_live(asked.live, asked)
        return

    if target is not None:
        from homenode.cli.plan_target import refuse_unknown_target
        from homenode.vm.plan_model import LIBVIRT

        refuse_unknown_target(target)
        target = None if target == LIBVIRT else target
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
        target=target,
    )
    if asked.start:
        _check_start_alone(asked, is_domain=is_domain)
    # Interruptible, since a test guest would run on.
    with interruptible(), working("booting a test guest" if asked.boot else "checking"):
        verified = verify_wanted(wanted, note)
    if asked.start:
        verified = _started(verified, wanted, yes=asked.yes)
    _print(verified, asked)
    if asked.svg is not None:
        _draw(verified, asked.svg)
    exit_by(verified.findings)


def _check_start_alone(asked: VerifyArguments, *, is_domain: bool) -> None:
    others = (asked.host, asked.lspci, asked.guest, asked.live, asked.target)
    if not is_domain or asked.boot or any(one is not None for one in others):
        raise UsageError(
            "--start: expected the name of a domain of this machine, and --plan alone with it",
            hint="homenode verify NAME --start: the VM itself is started, not a document",
        )
    check_can_ask(asked=not asked.yes, has_dry_run=False)


def _started(verified: Verified, wanted: VerifyRequest, *, yes: bool) -> Verified:
    """With what the VM shows when it is started paused; as it was where it could not start."""
    from homenode.change.host_lock import host_locked
    from homenode.change.journal import default_root
    from homenode.check.verify.start import startable, verify_paused
    from homenode.cli.restore import changing_host

    assert wanted.domain is not None, "_check_start_alone has seen to it"
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
    findings = Findings(
        checked=(*before.checked, *seen.checked),
        findings=in_order([*before.findings, *seen.findings]),
        not_checked=before.not_checked,
    )
    return structs.replace(verified, findings=findings)


def _refuse_idle(asked: VerifyArguments) -> None:
    """Options that would do nothing: whoever gives one expects what did not happen."""
    of_boot = {"--kernel": asked.kernel, "--timeout": asked.timeout, "--keep": asked.keep}
    idle = [] if asked.boot else [name for name, value in of_boot.items() if value is not None]
    elsewhere = asked.document is None or asked.host is not None
    if asked.connect is not None and not asked.boot and asked.live is None and elsewhere:
        idle.append("--connect")
    if idle:
        raise UsageError(f"{', '.join(idle)}: expected --boot as well, found none")
    if asked.svg is not None and asked.live is not None:
        raise UsageError("give either --svg or --live, not both")


def _print(verified: Verified, asked: VerifyArguments) -> None:
    def views() -> None:
        from homenode.show.findings_text import checks_text

        for view in verified.views:
            console().print(checks_text(view.title, view.checks))

    if asked.prometheus:
        print_file(prometheus(verified.findings, {"domain": str(asked.document)}))
    else:
        print_findings(verified.findings, as_json=asked.json, before=views)


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

    made = None
    if asked.plan is not None:
        from homenode.plan.stored import read_plan_for

        content = read_input(asked.plan, "a saved plan", hint="homenode plan --save-plan P.json")
        made = read_plan_for(load_host(None), content, str(asked.plan))
    findings = verify_running_domain(name, asked.connect or DEFAULT, made)
    if asked.prometheus:
        print_file(prometheus(findings, {"domain": name}))
    else:
        print_findings(findings, as_json=asked.json)
    exit_by(findings)
