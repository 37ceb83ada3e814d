"""Machine limits: the most vCPUs that a machine type takes.

Source: max_cpus in QEMU's hw/i386/pc_q35.c, hw/i386/pc.c and hw/arm/virt.c, by the version in the
machine type's name. A vendor's own machine types ("pc-q35-rhel9.4.0") have limits of their own.
"""

import re

from homenode.errors import InputError
from homenode.plan.model import PlanFinding, plan_finding
from homenode.vm.model import Vm

_SINCE: dict[str, tuple[tuple[tuple[int, int], int], ...]] = {
    "pc-q35": (((9, 0), 4096), ((8, 1), 1024), ((2, 8), 288), ((0, 0), 255)),
    "pc-i440fx": (((0, 0), 255),),
    "virt": (((3, 0), 512), ((0, 0), 255)),
}
"""Family -> (first version, most vCPUs), the newest first."""

_ALIASES = {"q35": "pc-q35", "pc": "pc-i440fx", "virt": "virt"}
"""Names that stand for the newest of their family that a QEMU has."""

_NAMED = re.compile(r"(pc-q35|pc-i440fx|virt)-(\d{1,3})\.(\d{1,3})(?:\.\d+)?", re.ASCII)
_EVERY_TYPE_TAKES = 255


def most_vcpus(machine: str | None, qemu: tuple[int, int, int] | None) -> int | None:
    """The most vCPUs of a machine type; None where it is not known.

    qemu: version of the host's QEMU, which is what an alias such as q35 depends on.

    >>> most_vcpus("pc-q35-7.2", None), most_vcpus("q35", (8, 2, 0)), most_vcpus("q35", None)
    (288, 1024, None)
    """
    named = _NAMED.fullmatch(machine or "")
    if named is not None:
        family, version = named[1], (int(named[2]), int(named[3]))
    else:
        family = _ALIASES.get(machine or "", "")
        limits = _SINCE.get(family, ())
        if qemu is None:
            return limits[0][1] if len(limits) == 1 else None
        version = qemu[:2]
    return next((most for since, most in _SINCE.get(family, ()) if version >= since), None)


def check_vcpus(
    guest: Vm, vcpus: int, qemu: tuple[int, int, int] | None, source: str = "domain"
) -> tuple[PlanFinding, ...]:
    """A finding where so many vCPUs may be too many for the machine type and its limit is unknown.

    Raises InputError where they are too many.
    """
    if vcpus <= _EVERY_TYPE_TAKES:
        return ()
    most = most_vcpus(guest.machine, qemu)
    machine = guest.machine or "none, which is libvirt's choice"
    if most is None:
        return (
            plan_finding(
                "vcpu-limit-unknown",
                "<vcpu>",
                f"{vcpus} vCPUs, and how many machine type {machine} takes is not known",
            ),
        )
    if vcpus <= most:
        return ()
    named = _NAMED.fullmatch(machine)
    of = machine if named or qemu is None else f"{machine} of QEMU {'.'.join(map(str, qemu))}"
    larger = "pc-q35-9.0 or newer (QEMU 9.0), which takes 4096"
    is_x86 = guest.architecture == "x86_64"
    raise InputError(
        f"{source}: expected at most {most} vCPUs, which is what machine type {of} takes, found "
        f"{vcpus}",
        hint=(f"use machine type {larger}, or " if is_x86 else "") + "give the VM fewer vCPUs",
    )
