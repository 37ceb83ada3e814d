"""A VM without a document gets one: planned, valid, defined by libvirt, planned again unchanged."""

import re
import shutil
import subprocess
from collections.abc import Iterator
from itertools import product
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from homenode.check.domain.verification import verify_document
from homenode.check.verify.boot.stand_in_boot import BootOptions, boot_stand_in
from homenode.errors import InputError, UsageError
from homenode.machine.description.parse import list_shipped_hosts
from homenode.machine.pci import DeviceKind
from homenode.machine.topology import Host
from homenode.plan.pipeline import plan_file
from homenode.plan.planner import resolve_layout
from homenode.units import GIB, KIB
from homenode.vm.domain.copy import make_domain
from homenode.vm.domain.crosscheck import check_references
from homenode.vm.domain.read import build_vm, open_domain, read_vm
from homenode.vm.domain.schema import validate
from homenode.vm.plan_options import PlanOptions
from homenode.vm.sources import load_host
from tests.seeds import draws, part


def planned(host: Host, options: PlanOptions, document: bytes | None = None) -> bytes:
    """The tuned document of a VM of options alone, or of this document."""
    xml = document or make_domain(2, GIB, architecture=host.architecture)
    chosen = resolve_layout(read_vm(xml, "vm.xml"), options, host).options
    return plan_file(xml, "vm.xml", chosen, host).document


@pytest.mark.parametrize("name", part(list_shipped_hosts(), 1, every=6))
def test_a_new_domain_is_valid_on_every_host_and_planned_again_unchanged(name: str) -> None:
    host = load_host(name)
    count = len(host.devices_of_kind(DeviceKind.GPU)) and 1
    for layout in ("auto", "pin-numa-smt"):
        options = PlanOptions(layout, gpu_count=count or None)
        made = planned(host, options)
        errors, gap = validate(made)
        assert not errors or gap is not None, errors
        document = open_domain(made, "vm.xml")
        assert check_references(document) == ()
        guest = build_vm(document)
        assert guest.architecture == (host.architecture or "x86_64")
        assert guest.is_virt if host.architecture == "aarch64" else guest.is_q35
        worse = {"critical", "warning"}
        found = verify_document(document, host=host).findings
        assert not [one for one in found if one.severity in worse]
        assert planned(host, PlanOptions(layout), made) == made


@settings(max_examples=draws(100), deadline=None)
@given(
    vcpus=st.integers(1, 512),
    memory=st.integers(1, 1 << 44),
    architecture=st.sampled_from(("x86_64", "aarch64", None)),
    name=st.from_regex(r"[^/\s\x00-\x1f\x7f-\x9f]{1,40}", fullmatch=True).filter(
        lambda name: name.isprintable() and name not in (".", "..")
    ),
)
def test_a_new_domain_is_read_as_it_was_asked_for(
    vcpus: int, memory: int, architecture: str | None, name: str
) -> None:
    xml = make_domain(vcpus, memory, architecture=architecture, name=name)
    guest = read_vm(xml, "vm.xml")
    assert (guest.name, guest.vcpus) == (name, vcpus)
    assert 0 <= guest.memory_bytes - memory < KIB
    assert guest.architecture == (architecture or "x86_64")
    assert not guest.hostdevs and b"<disk" not in xml
    assert validate(xml)[0] == ()


def test_what_libvirt_would_refuse_is_refused_by_name() -> None:
    with pytest.raises(UsageError, match="without / and line breaks"):
        make_domain(1, GIB, architecture="x86_64", name="../vm")
    with pytest.raises(InputError, match="found s390x"):
        make_domain(1, GIB, architecture="s390x")


# The real programs.

URI = "qemu:///system"
NAME = "homenode-test-new-domain"
HOST = "small-2n8c-2gpu"


def virsh(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["virsh", "-c", URI, *words], capture_output=True, text=True, timeout=300, check=False
    )


@pytest.fixture
def libvirt() -> Iterator[None]:
    if shutil.which("virsh") is None or virsh("uri").returncode:
        pytest.skip(f"no libvirtd answers at {URI}")
    virsh("undefine", "--nvram", NAME)
    yield
    virsh("undefine", "--nvram", NAME)


def for_tcg(document: bytes) -> bytes:
    """As any QEMU can be asked to define it: without KVM."""
    return re.sub(rb"type='kvm'", b"type='qemu'", document, count=1)


@pytest.mark.libvirt
@pytest.mark.parametrize(
    ("layout", "gpus"),
    part(list(product(("auto", "pin-numa-pci", "pin-numa-smt"), (0, 1, 2))), 0, every=4),
)
def test_libvirt_defines_a_new_domain_and_what_it_prints_is_planned_unchanged(
    libvirt: None, layout: str, gpus: int, tmp_path: Path
) -> None:
    host = load_host(HOST)
    options = PlanOptions(layout, gpu_count=gpus or None)
    xml = for_tcg(make_domain(4, GIB, architecture="x86_64", name=NAME))
    path = tmp_path / "vm.xml"
    path.write_bytes(planned(host, options, xml))
    defined = virsh("define", "--validate", str(path))
    assert defined.returncode == 0, defined.stderr
    printed = virsh("dumpxml", "--inactive", NAME).stdout.encode()
    assert planned(host, PlanOptions(layout), printed) == printed


@pytest.mark.libvirt
def test_libvirt_finds_firmware_and_a_command_line_for_a_new_domain(
    libvirt: None, tmp_path: Path
) -> None:
    path = tmp_path / "vm.xml"
    xml = for_tcg(make_domain(2, GIB, architecture="x86_64", name=NAME))
    path.write_bytes(xml.replace(b"'host-passthrough'", b"'maximum'"))
    command = virsh("domxml-to-native", "qemu-argv", "--xml", str(path))
    assert command.returncode == 0, command.stderr
    assert "OVMF" in command.stdout and "q35" in command.stdout


@pytest.mark.nightly
@pytest.mark.qemu
def test_qemu_starts_a_new_domain_with_stand_ins_of_its_devices() -> None:
    if shutil.which("qemu-system-x86_64") is None:
        pytest.skip("no qemu-system-x86_64 here")
    host = load_host(HOST)
    made = planned(host, PlanOptions("pin-numa-pci", vcpus=4, memory_bytes=GIB, gpu_count=2))
    document = open_domain(made, "vm.xml")
    options = BootOptions(connect="none", timeout_s=600)
    outcome = boot_stand_in(document, build_vm(document), options)
    assert outcome.guest is not None, outcome.findings
    assert len(outcome.guest.nodes) == 2
