"""Transfers of devices: link errors, and measured copies.

The status bits that lspci prints (CESta) stay set after the first training: they are not counters,
and are ignored.

Source: Documentation/ABI/testing/sysfs-bus-pci-devices-aer_stats; PCIe 6.0, 6.2 (errors).
"""

from collections.abc import Iterator, Mapping

from homenode.bdf import Bdf
from homenode.findings import Finding, Severity, finding
from homenode.machine.link_path import LinkRate, find_rates, format_rate, list_device_paths
from homenode.machine.pci import DeviceKind, LinkKind, PciDevice, PciErrors
from homenode.machine.topology import Host

_OF_THE_WIRE = frozenset({"RxErr", "BadTLP", "BadDLLP", "Rollover", "Timeout"})
_OF_RESETS = frozenset({"UnsupReq", "CmpltTO"})
"""Firmware's enumeration and a reset by VFIO or a driver leave these on sound machines: of the
second a few."""

_FEW_TIMEOUTS = 10

_MANY = 1000
"""A training or a reset leaves a handful, a sound GPU has 150 replays; a bad contact makes
thousands a day."""


def check_errors(host: Host) -> Iterator[Finding]:
    """Find lost data, and more retries than resets explain."""
    first_devices: dict[object, PciDevice] = {}
    for path in list_device_paths(host):
        first_devices.setdefault(path.device.bdf, path.device)
        for link in path.links:
            first_devices.setdefault(link.upper.bdf, link.upper)
            first_devices.setdefault(link.lower.bdf, link.lower)
    for device in first_devices.values():
        yield from _judge_function(device)


def _judge_function(device: PciDevice) -> Iterator[Finding]:
    errors = device.errors or PciErrors(())
    directory = f"/sys/bus/pci/devices/{device.bdf}"
    serious_errors = (*errors.fatal, *errors.nonfatal)
    if serious_errors:
        harmless = {name for name, _ in errors.nonfatal} <= _OF_RESETS and not errors.fatal
        harmless = harmless and dict(errors.nonfatal).get("CmpltTO", 0) < _FEW_TIMEOUTS
        yield finding(
            "pcie-errors-uncorrected",
            str(device.bdf),
            expected="no uncorrected errors",
            observed=_format_counts(serious_errors),
            severity=Severity.INFO if harmless else None,
            source=f"{directory}/aer_dev_nonfatal, aer_dev_fatal",
            devices=(device.bdf,),
            count=sum(count for _, count in serious_errors),
        )
    retries = sum(count for name, count in errors.correctable if name in _OF_THE_WIRE)
    replays = device.link_replays or 0
    if max(retries, replays) >= _MANY:
        counts = (*errors.correctable, *([("replays", replays)] if replays else []))
        yield finding(
            "pcie-errors-corrected",
            str(device.bdf),
            expected=f"fewer than {_MANY} retries since boot",
            observed=_format_counts(counts),
            source=f"{directory}/aer_dev_correctable; replay_counter of nvidia-smi -q",
            devices=(device.bdf,),
            count=max(retries, replays),
        )


def _format_counts(counts: tuple[tuple[str, int], ...]) -> str:
    return ", ".join(f"{name} {count}" for name, count in counts)


_SOUND = 0.7
"""Copies of large pinned buffers reach more of a sound path: 0.72 to 0.9 were measured."""


def copy_findings(
    host: Host,
    rates: Mapping[Bdf, float],
    everyone: float | None = None,
    known_widths: Mapping[Bdf, int] | None = None,
) -> Iterator[Finding]:
    """Find GPUs whose copies are slower than their path. rates: bytes/s by GPU; everyone: of any
    GPU. known_widths: as for device_paths. Unknown links of the path are not judged. Copies to a
    GPU that is attached to its CPU by C2C use C2C."""
    over_c2c = {link.a for link in host.links if link.kind is LinkKind.C2C}
    for path in list_device_paths(host, known_widths):
        if path.device.kind is not DeviceKind.GPU or path.device.bdf in over_c2c:
            continue
        rate = rates.get(path.device.bdf, everyone)
        if rate is None or path.expected is None:
            continue
        if rate > path.expected.bytes_per_s:
            yield finding(
                "h2d-above-link",
                f"GPU {path.device.bdf}",
                expected=f"at most {path.expected.format_with_rate()}",
                observed=f"{format_rate(rate)} measured, above its path's rate of {path.expected}",
                source="the result of --h2d, or of the copy that ran",
            )
        elif rate < _SOUND * path.expected.bytes_per_s:
            yield _make_slow_copy(path.device.bdf, rate, path.expected)


def _make_slow_copy(gpu: Bdf, rate: float, expected_rate: LinkRate) -> Finding:
    fits = find_rates(rate, expected_rate)
    excluded = LinkRate(2.5, expected_rate.width)
    not_one = f"; excludes {excluded.as_generation}" if excluded.bytes_per_s < rate else ""
    return finding(
        "h2d-low",
        f"GPU {gpu}",
        expected=f"{format_rate(_SOUND * expected_rate.bytes_per_s)} or more over "
        f"{expected_rate.format_with_rate()}",
        observed=f"{format_rate(rate)}, which fits "
        f"{', '.join(fit.as_generation for fit in fits) or 'no link at all'}{not_one}",
        severity=Severity.WARNING,
        values={"share": f"{(1 - rate / expected_rate.bytes_per_s) * 100:.0f}"},
        source="the result of --h2d, or of the copy that ran",
    )
