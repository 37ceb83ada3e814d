"""Versions: what of a document the host is too old for, or of another architecture."""

from collections.abc import Iterator

from homenode.catalogue import finding
from homenode.domain.codec import SINCE, older_than
from homenode.domain.document import Document
from homenode.findings import Finding
from homenode.topology import Host
from homenode.vm.model import Vm

_ALSO_RUN = {"x86_64": ("i686",), "aarch64": ("armv7l", "armv6l"), "ppc64le": ("ppc64",)}
"""Guests that KVM runs besides those of the host's own architecture."""


def versions_on_host(document: Document, guest: Vm, host: Host) -> Iterator[Finding]:
    """A finding for each element that is newer than the host's programs, and for a machine that
    KVM cannot run there; none where those are unknown."""
    run = (host.architecture, *_ALSO_RUN.get(host.architecture or "", ()))
    is_known = host.architecture is not None and guest.domain_type == "kvm"
    if is_known and guest.architecture not in run:
        yield finding(
            "other-architecture",
            "<type arch>",
            expected=f"{host.architecture}, the host's",
            observed=guest.architecture,
            values={"architecture": host.architecture},
            source=document.source,
        )
    settings = host.settings
    for row in SINCE:
        if not row.is_in(document, guest):
            continue
        for program, have, want in older_than(row, settings.libvirt_version, settings.qemu_version):
            yield finding(
                "too-old",
                row.element,
                expected=f"{program} {want} or newer",
                observed=f"{program} {have}",
                values={"program": program, "element": row.element},
                source=document.source,
            )
