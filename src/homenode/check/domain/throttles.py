"""Limits of a domain that slow it down whatever its placement: time of PUs, scheduler, I/O.

Source: <cputune>, <iotune> and <bandwidth> of https://libvirt.org/formatdomain.html; sched(7).
"""

from collections.abc import Iterator

from homenode.findings import Finding, Severity, finding
from homenode.vm.domain.document import Document, Element

_PERIOD_US = 100_000
"""libvirt's own, where none is given."""

_QUOTAS = (
    ("quota", "period", "each vCPU"),
    ("emulator_quota", "emulator_period", "the emulator"),
    ("iothread_quota", "iothread_period", "each IOThread"),
)
_SCHEDULERS = ("vcpusched", "iothreadsched", "emulatorsched")
_YIELDING = ("idle", "batch")
"""Schedulers that let other programs go first. fifo and rr go before them."""

_MAX_DIGITS = 18


def throttle_findings(document: Document) -> Iterator[Finding]:
    """A finding for each limit in a document."""
    tune = document.root.child("cputune")
    if tune is not None:
        yield from _quotas(document, tune)
    for element in document.root.all("cputune/*"):
        scheduler = element.get("scheduler")
        if element.name in _SCHEDULERS and scheduler in _YIELDING:
            yield finding(
                "scheduler-yields",
                f"<{element.name}>",
                expected="a scheduler that gives the VM its turn",
                observed=f"{scheduler}, after every other program",
            )
    yield from transfer_findings(document)


def _quotas(document: Document, tune: Element) -> Iterator[Finding]:
    for quota, period, subject in _QUOTAS:
        share = _share(tune, quota, period)
        if share is not None and share < 1:
            yield _slow(subject, share, f"<{quota}>")
    vcpus = _number(document.root.value("vcpu")) or 1
    share = _share(tune, "global_quota", "global_period")
    if share is not None and share < vcpus:
        yield _slow(f"all {vcpus} vCPUs together", share, "<global_quota>")


def _slow(subject: str, share: float, element: str) -> Finding:
    return finding(
        "cpu-quota",
        subject,
        expected="all time of their CPUs",
        observed=f"{share:.0%} of a CPU, by {element}",
    )


def _share(tune: Element, quota: str, period: str) -> float | None:
    """Of a PU; None where nothing limits it."""
    quota_us = _number(tune.value(quota))
    if not quota_us:
        return None
    return quota_us / (_number(tune.value(period)) or _PERIOD_US)


def _number(text: str | None) -> int | None:
    """Return a number, or None: a negative one means no limit, libvirt rejects other texts."""
    is_number = text is not None and text.isascii() and text.isdecimal()
    return int(text) if text is not None and is_number and len(text) <= _MAX_DIGITS else None


def transfer_findings(document: Document) -> Iterator[Finding]:
    """Disks and network interfaces with a limit: often meant so."""
    for path, element in (("disk", "iotune"), ("interface", "bandwidth")):
        for device in document.root.all(f"devices/{path}"):
            tune = device.child(element)
            if tune is None or not tune.children:
                continue
            text = ", ".join(_format_limit(child) for child in tune.children[:4])
            yield finding(
                "io-limit",
                f"{path} {device.value('target/@dev') or ''}".rstrip(),
                expected="the device's own rate",
                observed=f"<{element}>: {text}",
                severity=Severity.INFO,
            )


def _format_limit(element: Element) -> str:
    value = element.text.strip() or " ".join(f"{name} {text}" for name, text in element.attributes)
    return f"{element.name} {value}"[:80]
