"""homenode doctor retrain, and the hook that libvirt calls. [I/O]"""

import sys
from collections.abc import Callable
from typing import TYPE_CHECKING

from homenode.change.retrain.config_registers import SPEED_OF_CODE, SysfsConfigSpace
from homenode.change.retrain.execution import (
    LinkRecords,
    RetrainResult,
    RetrainStep,
    explain_interrupted,
    find_holders,
    open_retrain,
    retrain_journal,
)
from homenode.change.retrain.plan import (
    START,
    STARTED,
    RetrainPlan,
    describe,
    find_dropped_links,
    has_devices,
    list_domain_gpus,
    plan_retrain,
    read_slot_links,
    render_libvirt_hook,
    render_systemd_unit,
)
from homenode.cli.arguments.check import RetrainArguments, RetrainHookArguments
from homenode.cli.terminal import note, note_error, print_file, print_findings, say
from homenode.errors import (
    FINDINGS,
    HomenodeError,
    InputError,
    UsageError,
    missing,
    out_of_range,
)
from homenode.findings import Finding, Findings
from homenode.machine.discover.host import discover
from homenode.machine.snapshot.live import QuietSnapshot
from homenode.safe.input_files import read_input
from homenode.safe.record_directory import find_other_writer

if TYPE_CHECKING:
    from homenode.bdf import Bdf
    from homenode.machine.topology import Host

    Say = Callable[[str], None]


def retrain(arguments: RetrainArguments) -> None:
    """Train the links of devices again, through the ports above them.

    Changes the target speed in a port's Link Control 2 and sets Retrain Link, nothing else. Fails
    while a VM or a driver uses a device behind the port.
    """
    devices = arguments.devices
    if arguments.target is not None and arguments.target not in SPEED_OF_CODE:
        raise out_of_range("--target", str(arguments.target), 1, max(SPEED_OF_CODE))
    if arguments.print_hook:
        print_file(render_libvirt_hook(_find_program(), arguments.target))
        return
    if not devices:
        raise missing("BDF", "homenode doctor retrain 41:00.0")
    if arguments.print_unit:
        print_file(render_systemd_unit(devices, _find_program(), arguments.target))
        return
    host = _read_this_machine()
    findings: list[Finding] = []
    failure: HomenodeError | None = None
    for bdf in devices:
        try:
            findings += _retrain_device(
                host,
                bdf,
                arguments.target,
                apply=arguments.apply,
                say=note if arguments.json else say,
            )
        except HomenodeError as error:
            if len(devices) == 1:
                raise
            note_error(error)
            failure = error
    _print(findings, devices, as_json=arguments.json)
    if findings:
        raise SystemExit(FINDINGS)
    if failure is not None:
        raise SystemExit(failure.exit_code)


def hook(arguments: RetrainHookArguments) -> None:
    """Run the libvirt hook: DOMAIN start|started, with the domain XML as input. Errors are printed
    but do not fail the hook, because libvirt would not start the VM."""
    try:
        if len(arguments.words) != 2:
            raise UsageError(f"hook: expected DOMAIN and start or started, found {arguments.words}")
        _run_hook(
            *arguments.words, read_input("-", "the definition of the domain"), arguments.target
        )
    except HomenodeError as error:
        say(f"homenode: {error}")


def _run_hook(domain: str, operation: str, xml: bytes, target: int | None) -> None:
    if operation not in (START, STARTED) or not has_devices(xml):
        return
    host = _read_this_machine()
    gpus = list_domain_gpus(xml, host)
    if operation == STARTED:
        for finding in find_dropped_links(host, gpus, domain, LinkRecords().load(gpus)):
            say(str(finding))
        return
    for bdf in gpus:
        try:
            for finding in _retrain_device(host, bdf, target, apply=True, say=say):
                say(str(finding))
        except HomenodeError as error:  # the next GPU has a link of its own
            say(f"homenode: {error}")
    if gpus:
        LinkRecords().save(read_slot_links(_read_this_machine(), gpus))


def _retrain_device(
    host: "Host", bdf: "Bdf", target: int | None, *, apply: bool, say: "Say"
) -> tuple[Finding, ...]:
    space = SysfsConfigSpace()
    plan = plan_retrain(host, bdf, space, find_holders(host.pci_devices), target)
    for line in describe(plan):
        say(line)
    journal = retrain_journal(plan.port)
    entry = open_retrain(journal)
    if entry is not None:
        say(str(explain_interrupted(entry, plan.before)))
    if not apply:
        say("dry run: nothing was written; --apply writes")
        return () if entry is None else (explain_interrupted(entry, plan.before),)
    with journal.files.hold_lock("another homenode trains this link", wait_s=10):
        # Again: a VM may have started while this process waited.
        plan = plan_retrain(host, bdf, space, find_holders(host.pci_devices), target)
        step = RetrainStep(plan, space, open_retrain(journal))
        step.do(journal.write)
    _say_result(plan, step.result, say)
    return step.result.findings


def _say_result(plan: RetrainPlan, result: RetrainResult, say: "Say") -> None:
    for line in result.log:
        say(line)
    now = result.registers
    say(
        f"{plan.device}: {SPEED_OF_CODE.get(now.current_code, '?')} GT/s x{now.current_width}; "
        f"check: lspci -vvs {plan.device} | grep LnkSta"
    )


def _print(findings: list[Finding], devices: "tuple[Bdf, ...]", *, as_json: bool) -> None:
    answer = Findings(checked=tuple(f"link of {bdf}" for bdf in devices), findings=tuple(findings))
    if as_json or findings:
        print_findings(answer, "links", as_json=as_json)


def _read_this_machine() -> "Host":
    """The PCI tree of this machine without running tools: hooks and early boot must not wait."""
    return discover(QuietSnapshot())


def _find_program() -> str:
    """Return the program as it was called, for a unit or a hook that root runs; else the program
    next to the running Python, because `python -c` and a debugger cannot be installed. Raises
    InputError if another user than root can change it, its Python or its modules."""
    from pathlib import Path

    import homenode

    for path in (Path(sys.argv[0]), Path(sys.executable).with_name("homenode")):
        if path.name == "homenode" and path.exists():
            parts = (path.resolve(), Path(sys.executable), Path(homenode.__file__))
            if (reason := find_other_writer(parts)) is not None:
                raise InputError(
                    f"{path.resolve()}: expected a program that only root can change, as root "
                    f"would run it, found: {reason}",
                    hint="install homenode as root: python3 -m venv /opt/homenode, then "
                    "/opt/homenode/bin/pip install homenode",
                )
            return str(path.resolve())
    raise InputError(
        "the path of homenode is unknown",
        hint="call it by its full path",
    )
