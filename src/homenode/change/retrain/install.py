"""RetrainInstall: the systemd unit and the libvirt hook that keep links at full speed.

At start/begin, with managed devices on vfio-pci and no guest running yet, the links are raised. At
`started` they are only read: QEMU resets the bus during the start, which can drop a link; this is
reported, but never repaired under a running guest.
Source: systemd.unit(5), systemd.service(5), systemd.exec(5), systemd.resource-control(5); libvirt
"Hooks for specific system management".
"""

import shlex
from collections.abc import Iterator, Mapping, Sequence

from homenode.bdf import Bdf
from homenode.errors import UsageError
from homenode.findings import Finding, finding
from homenode.machine.link_path import LinkRate, format_rate, list_device_paths
from homenode.machine.pci import DeviceKind
from homenode.machine.topology import Host
from homenode.package_data import read_package_text
from homenode.vm.domain.hostdevs import read_hostdevs
from homenode.vm.domain.read import open_domain

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
