"""RetrainPlan: the two fields of a port that would be written, or the reasons against it.

Only a downstream port can retrain its link. Its Link Control 2 has the target speed, its Link
Control the bit that starts the training; of both registers only these fields are changed.

A systemd unit and a libvirt hook keep links at full speed. At start/begin, with managed devices on
vfio-pci and no guest running yet, the links are raised. At `started` they are only read: QEMU
resets the bus during the start, which can drop a link; this is reported, but never repaired under
a running guest.
Source: systemd.unit(5), systemd.service(5), systemd.exec(5), systemd.resource-control(5); libvirt
"Hooks for specific system management".
"""

import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence

from msgspec import Struct

from homenode.bdf import Bdf
from homenode.change.retrain.config_registers import (
    LINK_DISABLE,
    RETRAIN_LINK,
    SPEED_OF_CODE,
    TARGET_SPEED_MASK,
    ConfigSpace,
    LinkRegisters,
    read_registers,
)
from homenode.errors import HomenodeError, InputError, UsageError, out_of_range
from homenode.findings import Finding, finding
from homenode.machine.link_path import Link, LinkRate, format_rate, list_device_paths
from homenode.machine.pci import DeviceKind, PciDevice, PortType
from homenode.machine.topology import Host
from homenode.package_data import read_package_text
from homenode.vm.domain.hostdevs import read_hostdevs
from homenode.vm.domain.read import open_domain


class RetrainError(HomenodeError):
    """Retraining would disturb a device in use, or is impossible. Has every reason."""

    exit_code = 3

    def __init__(self, device: Bdf, reasons: Iterable[str], hint: str) -> None:
        super().__init__(f"{device}: its link is not retrained: {'; '.join(reasons)}", hint=hint)


Holders = Mapping[Bdf, tuple[str, ...] | None]
"""Processes that have a function's VFIO files open; None = unknown."""


class RetrainPlan(Struct, frozen=True):
    """The registers to write for one link."""

    port: Bdf  # the downstream port
    device: Bdf  # the function right below it
    before: LinkRegisters  # the port's registers as found
    target_code: int  # to write
    expected_width: int  # required width after the retrain
    is_exact: bool = False  # the user named the target, so that a faster link is to come down to it

    @property
    def is_needed(self) -> bool:
        """False if the link has the target speed, and would train to it again."""
        if self.is_exact:
            return {self.before.current_code, self.before.target_code} != {self.target_code}
        return (
            self.before.current_code < self.target_code
            or self.before.target_code < self.target_code
        )

    def is_at_target(self, registers: LinkRegisters) -> bool:
        """Whether the link runs at the target: at least as fast, or exactly if it was named."""
        if self.is_exact:
            return registers.current_code == self.target_code
        return registers.current_code >= self.target_code

    @property
    def target_gt_per_s(self) -> float:
        return SPEED_OF_CODE[self.target_code]


def plan_retrain(
    host: Host,
    device: Bdf,
    space: ConfigSpace,
    holders: Holders,
    target_gen: int | None = None,
) -> RetrainPlan:
    """Plan the link above a function. target_gen: None = the fastest that both ends support.

    holders: of every function behind the link; a missing one counts as unknown. Raises InputError
    for a wrong function or target, RetrainError with every reason, HostError for unreadable
    registers.
    """
    lower = _find_card_top(host, _find_lower_end(host, device))
    port = None if lower.parent is None else host.find_device(lower.parent)
    if port is None or port.bridge is None:
        raise InputError(
            f"{device}: expected a device below a PCIe port, found a device of the root complex",
            hint="it has no link to train",
        )
    if port.bridge.port_type not in (PortType.ROOT_PORT, PortType.SWITCH_DOWNSTREAM):
        raise InputError(
            f"{device}: expected a root port or a switch's downstream port above it, found "
            f"{port.bdf}, a {port.bridge.port_type}"
        )
    reasons = _find_users(host, port, holders)
    if reasons:  # before any register is read: configuration space of a used device is its user's
        raise RetrainError(
            lower.bdf,
            reasons,
            "shut the VM down, or unbind the driver: virsh nodedev-detach, then try again",
        )
    link = read_registers(space, port.bdf)
    device_link = read_registers(space, lower.bdf, is_port=False)
    target = _choose_target(lower.bdf, link, device_link, target_gen)
    state = []
    if link.control & LINK_DISABLE:
        state.append(f"port {port.bdf} has its link disabled (LnkCtl {link.control:#06x})")
    if link.is_training:
        state.append(f"port {port.bdf} is training (LnkSta {link.status:#06x})")
    if not link.is_up:
        state.append(f"port {port.bdf} has no link (LnkSta {link.status:#06x})")
    if state:
        raise RetrainError(
            lower.bdf,
            state,
            f"try again in a second; if the state stays, check the slot: lspci -vvs {port.bdf}",
        )
    return RetrainPlan(
        port.bdf, lower.bdf, link, target, link.current_width, is_exact=target_gen is not None
    )


def list_functions_behind(host: Host, port: Bdf) -> tuple[PciDevice, ...]:
    """Return every function below a port, at any depth."""
    parents = {port}
    functions: list[PciDevice] = []
    for device in host.pci_devices:  # ascending: bridges come before what is below them
        if device.parent in parents:
            parents.add(device.bdf)
            functions.append(device)
    return tuple(functions)


def describe(plan: RetrainPlan) -> tuple[str, ...]:
    """Return the plan as text, with its registers."""
    before = plan.before
    speed = SPEED_OF_CODE.get(before.current_code)
    target_speed = SPEED_OF_CODE.get(before.target_code)
    lines = [
        f"{plan.device} below port {plan.port}: link at {speed or '?'} GT/s "
        f"x{before.current_width}, port set to train to {target_speed or '?'} GT/s"
    ]
    if not plan.is_needed:
        return (*lines, f"nothing to do: the link runs at {plan.target_gt_per_s:g} GT/s")
    new = before.control_2 & ~TARGET_SPEED_MASK | plan.target_code
    control = before.control | RETRAIN_LINK
    return (
        *lines,
        f"would write only to port {plan.port}:",
        f"  Link Control 2 (CAP_EXP+0x30.w): {before.control_2:#06x} -> {new:#06x}, mask 0x000f: "
        f"target speed {plan.target_gt_per_s:g} GT/s",
        f"  Link Control (CAP_EXP+0x10.w): {before.control:#06x} -> {control:#06x}, "
        "mask 0x0020: Retrain Link",
        f"expected: {plan.target_gt_per_s:g} GT/s x{plan.expected_width}; the previous values "
        "are restored if it fails",
    )


def _find_lower_end(host: Host, bdf: Bdf) -> PciDevice:
    device = host.find_device(bdf)
    if device is None:
        raise InputError(f"{bdf}: no such PCI function on {host.name}")
    if device.physical_function is not None:
        raise InputError(
            f"{bdf}: expected a function with a link, found a virtual one",
            hint=f"its link is that of {device.physical_function}",
        )
    is_lower_port = device.bridge is not None and device.bridge.port_type in (
        PortType.ROOT_PORT,
        PortType.SWITCH_DOWNSTREAM,
    )
    if is_lower_port:
        child = next((d.bdf for d in host.pci_devices if d.parent == bdf), None)
        raise InputError(
            f"{bdf}: expected the device whose link is slow, found the port above it",
            hint=f"name the device below it: {child}" if child else "nothing is below it",
        )
    return device


def _find_card_top(host: Host, device: PciDevice) -> PciDevice:
    """Return the function at the slot; for a GPU behind a switch on its own card, the switch."""
    port = None if device.parent is None else host.find_device(device.parent)
    if port is None or port.parent is None or not Link(upper=port, lower=device).is_inside_a_card:
        return device
    return host.find_device(port.parent) or device


def _find_users(host: Host, port: PciDevice, holders: Holders) -> tuple[str, ...]:
    """Return all users that would lose the link for a moment."""
    reasons: list[str] = []
    for device in list_functions_behind(host, port.bdf):
        is_bridge = device.kind is DeviceKind.BRIDGE
        for domain in host.domains:
            if domain.running and device.bdf in domain.devices:
                reasons.append(f"running domain {domain.name!r} has {device.bdf}")
        if device.has_host_driver:
            reasons.append(f"driver {device.driver} works with {device.bdf}")
        if is_bridge:
            continue
        processes = holders.get(device.bdf)
        if "vfio" in (device.driver or "") and processes is None:
            reasons.append(f"it is unknown whether a VM has {device.bdf} (check as root)")
        for process in processes or ():
            reasons.append(f"{process} has the VFIO group of {device.bdf} open")
    return tuple(reasons)


def _choose_target(
    device: Bdf, port_link: LinkRegisters, device_link: LinkRegisters, target_gen: int | None
) -> int:
    speeds = set(port_link.speeds) & set(device_link.speeds)
    max_code = max(speeds, default=1)
    if target_gen is None:
        return max_code
    if target_gen not in SPEED_OF_CODE:
        raise out_of_range("--target", str(target_gen), 1, max(SPEED_OF_CODE))
    if target_gen not in speeds:
        ends = (
            f"the port can {SPEED_OF_CODE[port_link.max_code]:g} GT/s and the device "
            f"{SPEED_OF_CODE[device_link.max_code]:g} GT/s"
        )
        raise InputError(
            f"{device}: expected a target that both ends can, found generation {target_gen}: "
            f"{ends}",
            hint=f"--target {max_code} is the fastest that both can",
        )
    return target_gen


UNIT_NAME = "homenode-retrain.service"
_UNIT = read_package_text("change", "retrain", "unit.txt")
"""The unit runs before libvirtd, not before its sockets: these start before basic.target and the
unit after it, and systemd would break that cycle by dropping sockets.target. The kernel requires
SYS_ADMIN to read more than 64 bytes of a device's configuration space, and SYS_PTRACE with
DAC_READ_SEARCH to list files that other users' processes have open. ProtectSystem=strict exempts
/dev, /proc and /sys. systemd-analyze(1), security, rates each line. Older versions of systemd
ignore unknown lines with a warning."""


def render_systemd_unit(devices: Sequence[Bdf], program: str, target: int | None = None) -> str:
    """Return a unit that trains the links of these devices before any VM can start.

    target: generation; None = the fastest that both ends support. A missing or busy device does not
    prevent the others or libvirtd. Raises UsageError for a program that systemd cannot start.
    """
    if not program.isprintable() or any(letter in program for letter in "'\"\\"):
        raise UsageError(
            f"{program!r}: expected a path without quotes, '\\' and control characters, which "
            "systemd takes for no program"
        )
    # systemd expands "%"; addresses do not contain it.
    word = shlex.quote(program).replace("%", "%%")
    lines = (
        f"ExecStart=-{word} doctor retrain {bdf}{_format_option(target)} --apply" for bdf in devices
    )
    end = ("", "[Install]", "WantedBy=multi-user.target", "")
    return _UNIT + "\n".join((*lines, *end))


def _format_option(target: int | None) -> str:
    return "" if target is None else f" --target {target}"


def render_libvirt_hook(program: str, target: int | None = None) -> str:
    """Return a hook that calls homenode at start/begin and started/begin and never stops a VM.
    libvirt waits for it, so it does not call libvirt and has a time limit."""
    command = f'{shlex.quote(program)} doctor hook{_format_option(target)} -- "$1" "$2"'
    return f"""#!/bin/sh
# Written by: homenode doctor retrain --print-hook
# libvirt calls: qemu DOMAIN OPERATION SUB-OPERATION EXTRA, with the domain's XML as input.
PATH=/usr/sbin:/usr/bin:/sbin:/bin
case "$2/$3" in
start/begin|started/begin)
    timeout 30 {command} 2>&1 | logger -t homenode-hook
    ;;
esac
exit 0
"""


START, STARTED = "start", "started"


def list_domain_gpus(xml: bytes, host: Host) -> tuple[Bdf, ...]:
    """Return the domain's passed-through GPUs, one for each link, without virtual functions. Raises
    ParseError or InputError."""
    passed_bdfs = {hostdev.bdf for hostdev in read_hostdevs(open_domain(xml, "domain"))}
    return tuple(
        path.device.bdf
        for path in list_device_paths(host)
        if path.device.kind is DeviceKind.GPU and path.device.bdf in passed_bdfs
    )


def has_devices(xml: bytes) -> bool:
    """Return whether the domain has any PCI device of the host. Raises like gpus_of_domain."""
    return bool(read_hostdevs(open_domain(xml, "domain")))


def read_slot_links(host: Host, gpus: tuple[Bdf, ...]) -> dict[Bdf, LinkRate]:
    """Return the current link at each GPU's slot, if it is known."""
    return {
        path.device.bdf: path.links[0].current
        for path in list_device_paths(host)
        if path.device.bdf in gpus and path.links and path.links[0].current is not None
    }


def find_dropped_links(
    host: Host, gpus: tuple[Bdf, ...], domain: str, before: Mapping[Bdf, LinkRate]
) -> Iterator[Finding]:
    """Yield a critical finding for each GPU whose link is slower than at the start of the VM.

    before: the links at start/begin; a link that is not in it is compared with the speed that both
    ends support.
    """
    now = read_slot_links(host, gpus)
    for path in list_device_paths(host):
        current = now.get(path.device.bdf)
        if current is None:
            continue
        link = path.links[0]
        rate = before.get(path.device.bdf) or link.capable
        if rate is None:
            continue
        if path.device.bdf not in before:
            rate = LinkRate(rate.gt_per_s, current.width)
        if current.bytes_per_s >= rate.bytes_per_s:
            continue
        lost_share = 1 - current.bytes_per_s / rate.bytes_per_s
        when = "at start/begin" if path.device.bdf in before else "what both ends can"
        yield finding(
            "pcie-link-dropped",
            f"GPU {path.device.bdf} of domain {domain} below port {link.upper.bdf}",
            expected=f"{rate.format_with_rate()}, {when}",
            observed=current.format_with_rate(),
            cost=f"{lost_share * 100:.0f} % of the link: {format_rate(current.bytes_per_s)}",
            fix="shut the guest down, then homenode doctor retrain "
            f"{path.device.bdf} --apply; nothing is retrained under a running guest",
            source="LnkSta at libvirt's `started`, before the guest's driver can idle the link",
        )
