"""A real libvirtd takes every document that we write, and gives back one that we leave alone."""

import os
import re
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from homenode.change.apply.define_step import is_printed
from homenode.units import GIB
from homenode.vm.domain.copy import copy_domain
from homenode.vm.domain.read import read_vm
from homenode.vm.layout import PRESETS, GuestPcie
from homenode.vm.plan import Aperture
from homenode.vm.targets.libvirt import rewrite
from tests.domain_corpus import NAMES, sample
from tests.domain_plans import hand_plan
from tests.seeds import part

pytestmark = pytest.mark.libvirt
NAME = f"homenode-test-domain-xml-{os.getpid()}"
NOT_HERE = {"latin1", "utf16"}  # libvirt takes UTF-8 alone, whatever the declaration says
if shutil.which("qemu-system-aarch64") is None:
    NOT_HERE |= {"aarch64-virt"}

URI = "qemu:///system"


def virsh(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["virsh", "-c", URI, *words],
        capture_output=True,
        text=True,
        errors="replace",
        timeout=300,
        check=False,
    )


@pytest.fixture(scope="module")
def libvirt(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    if shutil.which("virsh") is None:
        pytest.skip("no virsh here")
    if virsh("uri").returncode:
        pytest.skip(f"no libvirtd answers at {URI}")
    path = tmp_path_factory.mktemp("libvirt") / "probe.xml"
    path.write_bytes(for_this_machine("one-line"))
    for _ in range(2):  # the first call may probe QEMU once
        started = time.monotonic()
        virsh("define", str(path))
        virsh("undefine", NAME)
        took_s = time.monotonic() - started
    if took_s > 40:  # on a busy machine it may well be ten, and we would have it tested there too
        pytest.skip(
            f"libvirtd takes {took_s:.0f} s for each define: it probes QEMU again and again, since "
            "it sees a /dev/kvm that does not work; bind a file of mode 000 over it"
        )
    yield
    virsh("undefine", "--nvram", NAME)


def for_this_machine(name: str) -> bytes:
    """A sample as a copy that any QEMU can be asked to define: no KVM, no firmware to look for."""
    xml = sample(name)
    xml = re.sub(rb"type=(['\"])kvm\1", rb"type=\1qemu\1", xml, count=1)
    xml = xml.replace(b"<ioapic driver='kvm'/>", b"")
    # Cache and bandwidth shares are for KVM alone.
    xml = re.sub(rb"<(cachetune|memorytune).*?</\1>", b"", xml, flags=re.DOTALL)
    return copy_domain(xml, NAME)


CASES = [
    (name, layout)
    for name in NAMES
    if name not in NOT_HERE
    for layout in PRESETS
    if not (name == "i440fx" and PRESETS[layout].pcie is GuestPcie.HOST)
]
PRINTED = ("pin", "pin-numa-pci", "pin-numa-smt")
"""Layouts of which each document gets the next one, where not all are tried."""


@pytest.mark.parametrize(("name", "layout"), part(CASES, 0, every=6))
def test_libvirt_defines_what_we_write_and_we_keep_what_it_prints(
    libvirt: None, tmp_path: Path, name: str, layout: str
) -> None:
    xml = for_this_machine(name)
    plan = hand_plan(read_vm(xml, name), layout)
    tuned = tmp_path / "tuned.xml"
    tuned.write_bytes(rewrite(xml, plan, name))
    defined = virsh("define", "--validate", str(tuned))
    assert defined.returncode == 0, defined.stderr
    printed = virsh("dumpxml", "--inactive", NAME).stdout.encode()
    assert virsh("undefine", "--nvram", NAME).returncode == 0
    assert rewrite(printed, plan, "dumpxml") == printed


@pytest.mark.parametrize(
    ("name", "layout"),
    part(
        [
            (name, PRINTED[(place + turn) % 3])
            for place, name in enumerate(dict.fromkeys(name for name, _ in CASES))
            for turn in range(3)
        ],
        0,
        every=8,
    ),
)
def test_what_libvirt_prints_of_a_tuned_document_is_distinguished_from_an_edit_of_it(
    libvirt: None, tmp_path: Path, name: str, layout: str
) -> None:
    if name == "i440fx" and PRESETS[layout].pcie is GuestPcie.HOST:
        return

    def printed(xml: bytes) -> bytes:
        path = tmp_path / "vm.xml"
        path.write_bytes(xml)
        defined = virsh("define", str(path))
        assert defined.returncode == 0, defined.stderr
        return virsh("dumpxml", "--inactive", "--security-info", NAME).stdout.encode()

    before = printed(for_this_machine(name))
    tuned = rewrite(before, hand_plan(read_vm(before, name), layout), name)
    after = printed(tuned)
    edited = after.replace(b"</name>", b"</name><title>mine</title>", 1)
    assert virsh("undefine", "--nvram", NAME).returncode == 0
    assert is_printed(tuned, before, after)
    assert not is_printed(tuned, before, edited)


def test_libvirt_takes_apertures_and_huge_pages(libvirt: None, tmp_path: Path) -> None:
    xml = for_this_machine("study")
    space = Aperture(1024 * GIB, 40, 65_536, 0, 0)
    plan = hand_plan(read_vm(xml, "study"), "pin-numa-pci", aperture=space, page_bytes=GIB)
    tuned = tmp_path / "tuned.xml"
    tuned.write_bytes(rewrite(xml, plan))
    defined = virsh("define", "--validate", str(tuned))
    assert defined.returncode == 0, defined.stderr
    printed = virsh("dumpxml", "--inactive", NAME).stdout.encode()
    assert virsh("undefine", "--nvram", NAME).returncode == 0
    assert rewrite(printed, plan, "dumpxml") == printed
