"""Devices of an encrypted guest go through iommufd where libvirt can, and a finding says else."""

from pathlib import Path

import pytest

from homenode.cli.planning import version_of
from homenode.errors import UsageError
from homenode.plan.options import PlanOptions
from homenode.sources import load_host
from homenode.topology import Host
from homenode.tuning import Tuning, tune

VM = (Path(__file__).parents[2] / "demo" / "gpu-vm.xml").read_bytes()
ENCRYPTED = (
    VM.replace(b"</devices>", b"</devices><launchSecurity type='sev-snp'/>")
    .replace(b"<hugepages>", b"<!--").replace(b"</hugepages>", b"-->")
    .replace(b"<page size='1' unit='GiB'/>", b"")
)  # fmt: skip


def on(libvirt: str | None, qemu: str | None) -> Host:
    from homenode.cli.planning import Sources

    sources = Sources(
        (), None, (), None, (), version_of("--libvirt", libvirt), version_of("--qemu", qemu)
    )
    return sources.with_versions(load_host("hgx-h100"))


def tuned(xml: bytes, libvirt: str | None, qemu: str | None = None) -> Tuning:
    options = PlanOptions(layout="pin", gpu_count=2, vcpus=8, memory_bytes=64 << 30)
    return tune(xml, "vm.xml", options, on(libvirt, qemu))


def missing(tuning: Tuning) -> bool:
    return any("(iommufd-missing)" in note for note in tuning.notes)


def test_a_new_libvirt_gives_each_device_iommufd_and_twice_is_once() -> None:
    once = tuned(ENCRYPTED, "12.1", "10.2")
    assert once.document.count(b"<driver iommufd='yes'/>") == 2
    assert not missing(once)
    again = tune(once.document, "vm.xml", PlanOptions(layout="pin"), on("12.1", "10.2"))
    assert again.document == once.document


@pytest.mark.parametrize(("libvirt", "qemu"), [("12.0.9", "10.2"), ("12.1", "8.1"), (None, None)])
def test_an_older_one_gets_none_and_a_finding(libvirt: str | None, qemu: str | None) -> None:
    tuning = tuned(ENCRYPTED, libvirt, qemu)
    assert b"iommufd" not in tuning.document
    assert missing(tuning)


def test_a_guest_that_is_not_encrypted_keeps_what_it_has() -> None:
    tuning = tuned(VM.replace(b"<hugepages>", b"<hugepages><!--x-->"), "12.1", "10.2")
    assert b"iommufd" not in tuning.document
    assert not missing(tuning)


@pytest.mark.parametrize("text", ["", "12.x", "1.2.3.4", "-1", "12.", "99999"])
def test_a_version_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(UsageError):
        version_of("--libvirt", text)
