"""LinkErrors: what functions on the paths of GPUs and NICs have counted since the kernel started.

The status bits that lspci prints (CESta) stay set from the first training on: they are no count,
and nothing is concluded from them.

Source: Documentation/ABI/testing/sysfs-bus-pci-devices-aer_stats; PCIe 6.0, 6.2.
"""

from collections.abc import Iterator

from homenode.catalogue import finding
from homenode.findings import Finding, Severity
from homenode.machine.device_path import device_paths
from homenode.machine.pci import PciDevice, PciErrors
from homenode.machine.topology import Host

_OF_THE_WIRE = frozenset({"RxErr", "BadTLP", "BadDLLP", "Rollover", "Timeout"})
_OF_RESETS = frozenset({"UnsupReq", "CmpltTO"})
"""Firmware's enumeration and a reset by VFIO or a driver leave these on sound machines."""

_MANY = 1000
"""A training or a reset leaves a handful, a sound GPU has 150 replays; a bad contact makes
thousands a day."""


def error_findings(host: Host) -> Iterator[Finding]:
    """Lost data at any count, and retries that are too many to come from resets."""
    seen: dict[object, PciDevice] = {}
    for path in device_paths(host):
        seen.setdefault(path.device.bdf, path.device)
        for link in path.links:
            seen.setdefault(link.upper.bdf, link.upper)
            seen.setdefault(link.lower.bdf, link.lower)
    for device in seen.values():
        yield from _of_function(device)


def _of_function(device: PciDevice) -> Iterator[Finding]:
    errors = device.errors or PciErrors(())
    folder = f"/sys/bus/pci/devices/{device.bdf}"
    lost = (*errors.fatal, *errors.nonfatal)
    if lost:
        harmless = {name for name, _ in errors.nonfatal} <= _OF_RESETS and not errors.fatal
        yield finding(
            "pcie-errors-uncorrected",
            str(device.bdf),
            expected="no uncorrected errors",
            observed=_stated(lost),
            severity=Severity.INFO if harmless else Severity.WARNING,
            source=f"{folder}/aer_dev_nonfatal, aer_dev_fatal",
        )
    retries = sum(count for name, count in errors.correctable if name in _OF_THE_WIRE)
    replays = device.link_replays or 0
    if max(retries, replays) >= _MANY:
        stated = errors.correctable or (("replays", replays),)
        yield finding(
            "pcie-errors-corrected",
            str(device.bdf),
            expected=f"fewer than {_MANY} retries since boot",
            observed=_stated(stated),
            source=f"{folder}/aer_dev_correctable; replay_counter of nvidia-smi -q",
        )


def _stated(counts: tuple[tuple[str, int], ...]) -> str:
    return ", ".join(f"{name} {count}" for name, count in counts)
