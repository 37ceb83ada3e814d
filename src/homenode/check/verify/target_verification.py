"""TargetVerification: a hypervisor's file against its plan, and booted in small. [I/O]"""

from collections.abc import Callable
from pathlib import Path

from homenode.check.verify.boot.stand_in_boot import BootOptions, boot_command
from homenode.check.verify.guest.expectation import expectation_of
from homenode.check.verify.guest.view import (
    GuestView,
    as_passed_through,
    not_in_stand_in,
    view_of_stand_in,
)
from homenode.check.verify.target_file import verify_target
from homenode.errors import InputError, UsageError
from homenode.findings import Findings, in_order
from homenode.input_files import read_file
from homenode.machine.topology import Host
from homenode.plan.vm_file import kind_of
from homenode.vm.plan_model import Plan
from homenode.vm.targets.registry import TARGETS, target_named

_MOST_HOOK_BYTES = 16 << 20


def verify_target_file(
    content: bytes,
    path: Path,
    plan: Plan | None,
    host: Host | None,
    boot: BootOptions | None,
    notify: Callable[[str], None],
) -> tuple[Findings, tuple[GuestView, ...], tuple[Host, ...]]:
    """What of a target's file is not as planned, and what its test guest reports.

    Raises UsageError without a plan, InputError for a target that no test guest boots for.
    """
    source = str(path)
    target = kind_of(content, source)
    if plan is None:
        raise UsageError(
            f"{source}: expected the plan to compare it with, found none",
            hint="homenode plan --target ... --save-plan P.json, then verify FILE --plan P.json",
        )
    module = target_named(target)
    script = None
    hook = None if module.hook_suffix is None else path.with_name(path.name + module.hook_suffix)
    if hook is not None and hook.is_file():
        script = read_file(hook, "the hook that was written with it", most=_MOST_HOOK_BYTES)
    found = verify_target(content, source, target, plan, host=host, hook=script)
    if boot is None:
        return found, (), ()
    if module.words_of is None:
        bootable = " or ".join(name for name in TARGETS if target_named(name).words_of is not None)
        raise InputError(
            f"{source}: expected a file for {bootable} to boot, found one for {module.title}",
            hint="verify it without --boot",
        )
    words = tuple(module.words_of(content, source))
    notify("booting a test guest; seconds to minutes")
    booted = boot_command(words, source, boot)
    extra = [*booted.findings, *not_in_stand_in(booted.stand_in, source)]
    checked = (*found.checked, f"test guest, {booted.how}: {booted.seconds:.1f} s")
    views: tuple[GuestView, ...] = ()
    guests: tuple[Host, ...] = ()
    if booted.guest is not None:
        expected = expectation_of(plan.vm, host=host)
        views = (view_of_stand_in(expected, booted.stand_in, booted.guest),)
        guests = (as_passed_through(booted.guest, expected, booted.stand_in, host),)
        extra += views[0].findings
    return Findings(checked=checked, findings=in_order([*found.findings, *extra])), views, guests
