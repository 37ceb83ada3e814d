"""MeasuredCopy: what a measured host-to-device rate says of a GPU's link."""

from collections.abc import Iterator, Mapping

from homenode.bdf import Bdf
from homenode.catalogue import finding
from homenode.findings import Finding, Severity
from homenode.machine.device_path import device_paths
from homenode.machine.link_rate import LinkRate, gigabytes, rates_that_fit
from homenode.machine.pci import DeviceKind, LinkKind
from homenode.machine.topology import Host

_SOUND = 0.7
"""Copies of large pinned buffers reach more of a sound path: 0.72 to 0.9 were measured."""


def copy_findings(
    host: Host,
    rates: Mapping[Bdf, float],
    everyone: float | None = None,
    known_widths: Mapping[Bdf, int] | None = None,
) -> Iterator[Finding]:
    """GPUs whose copies are slower than their path. rates: bytes/s by GPU; everyone: of any GPU.

    known_widths: as for device_paths. A copy says nothing of links faster than itself, so what is
    unknown of the path is not judged. Copies to a GPU that hangs on its CPU by C2C go over that.
    """
    over_c2c = {link.a for link in host.links if link.kind is LinkKind.C2C}
    for path in device_paths(host, known_widths):
        if path.device.kind is not DeviceKind.GPU or path.device.bdf in over_c2c:
            continue
        rate = rates.get(path.device.bdf, everyone)
        if rate is None or path.expected is None:
            continue
        if rate > path.expected.bytes_per_s:
            yield finding(
                "h2d-above-link",
                f"GPU {path.device.bdf}",
                expected=f"at most {path.expected.with_rate()}",
                observed=f"{gigabytes(rate)} measured",
                source="the figure of --h2d, or of the copy that ran",
            )
        elif rate < _SOUND * path.expected.bytes_per_s:
            yield _slow(path.device.bdf, rate, path.expected)


def _slow(gpu: Bdf, rate: float, expected: LinkRate) -> Finding:
    fits = rates_that_fit(rate, expected)
    excluded = LinkRate(2.5, expected.width)
    not_one = f"; excludes {excluded.as_generation}" if excluded.bytes_per_s < rate else ""
    return finding(
        "h2d-low",
        f"GPU {gpu}",
        expected=f"{gigabytes(_SOUND * expected.bytes_per_s)} or more over {expected.with_rate()}",
        observed=f"{gigabytes(rate)}, which fits "
        f"{', '.join(fit.as_generation for fit in fits) or 'no link at all'}{not_one}",
        severity=Severity.WARNING,
        values={"share": f"{(1 - rate / expected.bytes_per_s) * 100:.0f}"},
        source="the figure of --h2d, or of the copy that ran",
    )
