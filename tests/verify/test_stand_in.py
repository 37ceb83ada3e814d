"""A stand-in has the vCPUs, cells and PCIe tree of its document, and nothing that needs a host."""

import shlex
from pathlib import Path

import pytest

from homenode.bdf import Bdf
from homenode.check.verify.boot.boot_directory import find_daemon_trouble
from homenode.check.verify.boot.forms import (
    BootFiles,
    stand_in_argv,
    stand_in_of_command,
    stand_in_xml,
)
from homenode.check.verify.boot.guest_files import (
    find_guest_files,
    is_static,
    pack_initramfs,
    refusal_finding,
)
from homenode.check.verify.boot.stand_in import (
    MAX_BYTES,
    SUBSTITUTE_CPU_MODEL,
    TWO_GUESTS_TEXT,
    CpuChoice,
    MinimalGuest,
    build_test_guest,
    choose_cpu,
)
from homenode.check.verify.boot.stand_in_boot import COMMAND, build_kernel_command
from homenode.check.verify.guest_checks import find_untested_parts
from homenode.cpuset import CpuSet
from homenode.errors import HostError
from homenode.findings import Finding, Severity
from homenode.units import MIB
from homenode.vm.domain.crosscheck import check_references
from homenode.vm.domain.document import Document
from homenode.vm.domain.read import build_vm, open_domain
from homenode.vm.domain.schema import validate
from homenode.vm.layout import PRESETS
from homenode.vm.model import GuestAddress
from homenode.vm.sources import load_host
from homenode.vm.targets.qemu_command import split_fields
from tests.domain_corpus import NAMES, sample
from tests.single_edits import users_vm
from tests.verify_documents import DEVICES, PLAIN, changed, small_host, tuned

FILES = BootFiles("/k, & <kernel>", "/i", "/console", "/report")
SKYLAKE = CpuChoice("custom", SUBSTITUTE_CPU_MODEL, (), None, None)


def document(xml: bytes) -> Document:
    return open_domain(xml, "vm.xml")


def stand_in(xml: bytes, cpu: CpuChoice = SKYLAKE, machine: str = "q35") -> MinimalGuest:
    opened = document(xml)
    return build_test_guest(opened, build_vm(opened), cpu, machine)


def argv(xml: bytes) -> str:
    return shlex.join(stand_in_argv(stand_in(xml), "n", FILES, "quiet", kvm=False))


def test_the_stand_in_has_the_documents_cells_distances_and_tree() -> None:
    made = stand_in(tuned("pin-numa-pci").document)
    assert [cell.vcpus for cell in made.vm.cells] == [CpuSet([0, 1]), CpuSet([2, 3])]
    assert [cell.distances for cell in made.vm.cells] == [(10, 20), (20, 10)]
    models = [controller.model for controller in made.vm.controllers]
    assert models == ["pcie-expander-bus"] * 2 + ["pcie-root-port"] * 2
    assert made.devices == (
        (GuestAddress(0, 3, 0, 0), Bdf.parse(DEVICES[0])),
        (GuestAddress(0, 4, 0, 0), Bdf.parse(DEVICES[1])),
    )
    assert made.vm.memory_bytes == 2 * 192 * MIB


def test_devices_without_an_address_get_a_port_on_the_root_bus() -> None:
    made = stand_in(tuned("default").document)
    assert [(c.model, str(c.address)) for c in made.vm.controllers] == [
        ("pcie-root-port", "0000:00:02.0"),
        ("pcie-root-port", "0000:00:03.0"),
    ]
    assert [str(address) for address, _ in made.devices] == ["0000:01:00.0", "0000:02:00.0"]


def test_memory_is_scaled_down_in_proportion_and_never_up() -> None:
    xml = changed(
        tuned("pin-numa-pci").document,
        ("<memory unit='GiB'>4", "<memory unit='GiB'>1024"),
        ("cpus='0,1' memory='2048'", f"cpus='0,1' memory='{768 * 1024}'"),
        ("cpus='2,3' memory='2048'", f"cpus='2,3' memory='{256 * 1024}'"),
    )
    made = stand_in(xml)
    sizes = [cell.memory_bytes for cell in made.vm.cells]
    assert sizes == [576 * MIB, 192 * MIB] and sum(sizes) <= MAX_BYTES
    tiny = stand_in(changed(PLAIN, ("<memory unit='GiB'>4", "<memory unit='MiB'>128")))
    assert tiny.vm.memory_bytes == 128 * MIB


def test_what_the_stand_in_leaves_out_is_inconclusive_by_name() -> None:
    dimm = "<memory model='dimm'><target><size unit='GiB'>1</size><node>0</node></target></memory>"
    xml = changed(
        tuned("pin-numa-pci").document,
        ("<os>", "<os firmware='efi'>"),
        ("<memory unit='GiB'>4<", "<memory unit='GiB'>5<"),
        ("</devices>", f"<iommu model='virtio'/>{dimm}</devices><launchSecurity type='tdx'/>"),
    )
    found = list(find_untested_parts(stand_in(xml), "vm.xml"))
    assert [finding.subject for finding in found] == [
        "UEFI firmware (no image here: apt-get install ovmf)",
        "the devices' BARs and the address space for them (the devices' host is unknown)",
        "memory devices",
        "the vIOMMU",
        "launch security tdx",
    ]
    assert {finding.severity for finding in found} == {Severity.INCONCLUSIVE}
    opened = document(tuned("pin-numa-pci").document)
    made = build_test_guest(opened, build_vm(opened), SKYLAKE, "q35", host=small_host())
    assert not list(find_untested_parts(made, "vm.xml"))


def test_a_file_that_is_no_kernel_is_refused_before_anything_boots(tmp_path: Path) -> None:
    (tmp_path / "vmlinuz").write_bytes(b"#!/bin/sh\n" * 100)
    with pytest.raises(HostError, match="not a Linux kernel"):
        find_guest_files(tmp_path / "vmlinuz")


@pytest.mark.parametrize("layout", PRESETS)
def test_the_stand_ins_document_passes_schema_and_cross_check(layout: str) -> None:
    xml = stand_in_xml(stand_in(tuned(layout).document), "n", FILES, "a & b", kvm=False).encode()
    errors, gap = validate(xml)
    assert not errors, gap
    assert not check_references(document(xml))
    again = document(xml).root
    kernel = again.find("os/kernel")
    assert kernel is not None and kernel.text == FILES.kernel
    assert again.find("devices/hostdev") is None


@pytest.mark.parametrize("name", NAMES)
def test_any_x86_document_has_a_stand_in(name: str) -> None:
    opened = open_domain(sample(name), name)
    facts = build_vm(opened)
    if facts.architecture != "x86_64":
        with pytest.raises(HostError, match="expected an x86_64 guest"):
            build_test_guest(opened, facts, SKYLAKE, "q35")
        return
    made = build_test_guest(opened, facts, SKYLAKE, "q35" if facts.is_q35 else "pc")
    hostdevs = {hostdev.bdf for hostdev in facts.hostdevs}
    assert hostdevs <= {bdf for _, bdf in made.devices}
    assert len({address for address, _ in made.devices}) == len(made.devices)
    xml = stand_in_xml(made, "n", FILES, "quiet", kvm=False).encode()
    assert not validate(xml)[0]


def test_more_vcpus_than_tcg_can_have_are_refused_by_number() -> None:
    with pytest.raises(HostError, match=r"at most 255 vCPUs.*found 300"):
        stand_in(changed(PLAIN, (">4</vcpu>", ">300</vcpu>")))


def test_qemus_command_line_says_the_same() -> None:
    words = argv(tuned("pin-numa-pci").document)
    for part in (
        "-smp 4,sockets=2,dies=1,cores=2,threads=1",
        "-numa node,nodeid=1,cpus=2-3,memdev=m1",
        "-numa dist,src=0,dst=1,val=20",
        "pxb-pcie,id=pci.2,bus_nr=248,numa_node=1,bus=pcie.0,addr=0x11.0x0",
        "pcie-root-port,id=pci.3,chassis=3,bus=pci.1,addr=0x0.0x0",
        "virtio-serial-pci,bus=pci.3,addr=0x0.0x0",
        "-accel tcg,thread=single",
    ):
        assert part in words, part
    assert "/k, & <kernel>" in words and "-nodefaults" in words


def test_bridges_have_the_properties_that_qemu_knows() -> None:
    """As `qemu-system-x86_64 -device NAME,help` of 7.2 lists them."""
    models = (
        *("pcie-root-port", "pcie-switch-upstream-port", "pcie-switch-downstream-port"),
        *("dmi-to-pci-bridge", "pci-bridge", "pcie-to-pci-bridge"),
    )
    buses = (0, 1, 2, 0, 4, 3)
    added = "".join(
        f"<controller type='pci' index='{i}' model='{model}'><address type='pci' "
        f"domain='0x0000' bus='{bus:#04x}' slot='{4 + i:#04x}' function='0x0'/></controller>"
        for i, (model, bus) in enumerate(zip(models, buses, strict=True), start=1)
    )
    words = argv(changed(PLAIN, ("model='pcie-root'/>", f"model='pcie-root'/>{added}"))).split()
    assert set(words) >= {
        "pcie-root-port,id=pci.1,chassis=1,bus=pcie.0,addr=0x5.0x0",
        "x3130-upstream,id=pci.2,bus=pci.1,addr=0x6.0x0",
        "xio3130-downstream,id=pci.3,chassis=3,bus=pci.2,addr=0x7.0x0",
        "i82801b11-bridge,id=pci.4,bus=pcie.0,addr=0x8.0x0",
        "pci-bridge,id=pci.5,chassis_nr=5,bus=pci.4,addr=0x9.0x0",
        "pcie-pci-bridge,id=pci.6,bus=pci.3,addr=0xa.0x0",
    }


def test_functions_that_share_a_slot_are_multifunction() -> None:
    words = argv(sample("gpu-with-audio-and-nics"))
    shared = [word for word in words.split() if "multifunction=on" in word]
    assert shared and all(".0x0" in word for word in shared)


def refused(said: str) -> tuple[Finding, ...]:
    return (refusal_finding("libvirt", said, "vm.xml"),)


def test_only_what_libvirt_says_of_the_document_is_compared_with_it() -> None:
    for said in ("XML error: Attempted double use", "unsupported configuration: no such thing"):
        assert not find_daemon_trouble(refused(said), "qemu:///system")
    excuse = find_daemon_trouble(refused("internal error: cannot make a namespace"), "test:///x")
    assert [(f.id, f.severity) for f in excuse] == [("libvirt-could-not-start", "inconclusive")]
    assert not find_daemon_trouble((), "qemu:///system")


CPU = "<cpu mode='host-passthrough'/>"


@pytest.mark.parametrize(
    ("cpu", "kvm", "mode", "model", "substituted"),
    [
        (CPU, True, "host-passthrough", None, False),
        (CPU, False, "custom", SUBSTITUTE_CPU_MODEL, True),
        ("<cpu mode='host-model'/>", True, "host-passthrough", None, False),
        ("<cpu><model>Icelake-Server</model></cpu>", False, "custom", "Icelake-Server", False),
        ("<cpu><model>EPYC-Milan</model></cpu>", False, "custom", SUBSTITUTE_CPU_MODEL, True),
        ("<cpu><model>EPYC-Milan</model></cpu>", True, "custom", "EPYC-Milan", False),
        ("<cpu><model>x,max=on</model></cpu>", False, "custom", SUBSTITUTE_CPU_MODEL, True),
        ("", False, "custom", SUBSTITUTE_CPU_MODEL, True),
    ],
)
def test_the_cpu_is_the_documents_where_it_can_run_here(
    cpu: str, kvm: bool, mode: str, model: str | None, substituted: bool
) -> None:
    made = document(changed(PLAIN, (CPU, cpu)))
    chosen = choose_cpu(made, build_vm(made), kvm=kvm)
    assert (chosen.mode, chosen.model) == (mode, model)
    assert (chosen.substituted is not None) is substituted


def test_features_with_names_that_are_none_are_left_out() -> None:
    cpu = (
        "<cpu mode='host-passthrough'><feature policy='require' name='topoext'/>"
        "<feature policy='disable' name='hle'/><feature name='a,b=c'/></cpu>"
    )
    made = document(changed(PLAIN, (CPU, cpu)))
    chosen = choose_cpu(made, build_vm(made), kvm=True)
    assert chosen.features == (("topoext", True), ("hle", False))


def elf(*kinds: int) -> bytes:
    """A 64-bit ELF with program headers of these kinds."""
    head = bytearray(64)
    head[:6] = b"\x7fELF\x02\x01"
    head[18] = 62
    head[32:40] = (64).to_bytes(8, "little")
    head[54:56], head[56:58] = (56).to_bytes(2, "little"), len(kinds).to_bytes(2, "little")
    return bytes(head) + b"".join(kind.to_bytes(4, "little") + bytes(52) for kind in kinds)


def test_only_a_static_busybox_will_do() -> None:
    assert not is_static(elf(1).replace(bytes([62]), bytes([183]), 1))  # aarch64
    assert is_static(elf(1, 4)) and not is_static(elf(1, 3)) and not is_static(b"#!/bin/sh\n")
    with pytest.raises(HostError, match="statically linked") as caught:
        pack_initramfs(elf(3))
    assert "busybox-static" in (caught.value.hint or "")


def members(archive: bytes) -> dict[str, tuple[int, bytes]]:
    """(mode, content) of each member of a newc archive, in order."""
    found = {}
    at = 0
    while at < len(archive):
        assert archive[at : at + 6] == b"070701"
        fields = [int(archive[at + 6 + 8 * i : at + 14 + 8 * i], 16) for i in range(13)]
        name_end = at + 110 + fields[11] - 1
        name = archive[at + 110 : name_end].decode()
        start = -(-(name_end + 1) // 4) * 4
        found[name] = (fields[1], archive[start : start + fields[6]])
        at = -(-(start + fields[6]) // 4) * 4
    return found


def test_the_initramfs_holds_busybox_the_collector_and_an_init() -> None:
    program = elf(1)
    archive = pack_initramfs(program)
    assert archive == pack_initramfs(program)
    inside = members(archive)
    assert list(inside)[-1] == "TRAILER!!!"
    assert inside["bin/busybox"] == (0o100755, program)
    assert b"homenode-collector" in inside["collector"][1]
    assert inside["init"][1].startswith(b"#!/bin/busybox sh\n")
    assert b"poweroff -f" in inside["init"][1]


def test_the_busybox_of_this_machine_is_recognised() -> None:
    path = Path("/bin/busybox")
    if not path.exists():
        pytest.skip("no /bin/busybox here")
    assert isinstance(is_static(path.read_bytes()), bool)


def test_the_stand_in_has_acpi_where_its_document_has_it() -> None:
    with_acpi = tuned("pin-numa-pci").document
    without = changed(with_acpi, ("    <acpi/>\n", ""))
    assert "acpi=off" not in argv(with_acpi) and "-machine q35,acpi=off" in argv(without)
    for xml, stated in ((with_acpi, True), (without, False)):
        written = stand_in_xml(stand_in(xml), "n", FILES, "quiet", kvm=False)
        assert ("<acpi/>" in written) is stated
        assert not validate(written.encode())[0]


def test_settings_that_no_stand_in_has_are_listed_by_name() -> None:
    xml = changed(
        tuned("pin-numa-pci").document,
        ("<apic/>", "<apic/><hyperv><relaxed state='on'/></hyperv><hap/>"),
        ("<vcpu", "<memoryBacking><source type='memfd'/><locked/></memoryBacking><vcpu"),
        ("machine='q35'", "machine='pc-q35-42.0'"),
    )
    opened = document(xml)
    made = build_test_guest(opened, build_vm(opened), SKYLAKE, "q35", host=small_host())
    assert [finding.subject for finding in find_untested_parts(made, "vm.xml")] == [
        "machine type pc-q35-42.0, which this QEMU lacks (q35 instead)",
        "the feature hyperv",
        "the feature hap",
        "memory backing locked",
    ]


def test_settings_that_decide_what_the_guest_sees_come_from_the_document() -> None:
    xml = changed(
        tuned("pin-numa-pci").document,
        ("<apic/>", "<apic/><vmport state='off'/><smm state='on'/><pmu state='off'/>"),
        ("<vcpu", "<memoryBacking><access mode='shared'/></memoryBacking><vcpu"),
        ("</devices>", "<iommu model='intel'><driver intremap='on'/></iommu></devices>"),
    )
    words = argv(xml)
    assert "q35,vmport=off,smm=on" in words
    assert "Skylake-Server,pmu=off" in words
    assert "memory-backend-memfd,share=on,id=m0" in words
    assert "-device intel-iommu,intremap=on" in words
    through = stand_in_xml(stand_in(xml), "n", FILES, "quiet", kvm=False)
    assert "<acpi/><apic/><vmport state='off'/><smm state='on'/><pmu state='off'/>" in through
    assert "<access mode='shared'/>" in through
    assert not validate(through.encode())[0]


@pytest.mark.parametrize(
    ("vcpu", "smp", "later"),
    [
        (" current='3'>4</vcpu>", "3,maxcpus=4", []),
        (
            ">4</vcpu><vcpus><vcpu id='1' enabled='no' hotpluggable='yes'/></vcpus>",
            "1,maxcpus=4",
            ["core-id=2", "core-id=3"],
        ),
    ],
)
def test_offline_vcpus_are_offline_in_it(vcpu: str, smp: str, later: list[str]) -> None:
    xml = changed(tuned("pin").document, (">4</vcpu>", vcpu))
    words = argv(xml)
    assert f"-smp {smp}," in words
    there = [word for word in words.split() if word.startswith("Skylake-Server-x86_64-cpu")]
    assert len(there) == len(later)
    through = stand_in_xml(stand_in(xml), "n", FILES, "quiet", kvm=False)
    assert through.count("enabled='no'") == 1
    assert not validate(through.encode())[0]


def test_many_vcpus_without_kvm_are_another_guest_than_that_of_the_pcie_tree() -> None:
    opened = document(users_vm("8 GPUs").document)
    facts, host = build_vm(opened), load_host("hgx-h100")
    made = build_test_guest(opened, facts, SKYLAKE, "q35", host=host, has_ovmf=True, kvm=False)
    assert TWO_GUESTS_TEXT in made.left_out and made.needs_qemu
    vcpus, tree = made.guests
    assert vcpus.vm.vcpus == 64 and vcpus.vm.cpu_topology == made.vm.cpu_topology
    assert vcpus.vm.offline_vcpus == made.vm.offline_vcpus
    assert [cell.vcpus for cell in vcpus.vm.cells] == [cell.vcpus for cell in made.vm.cells]
    assert not (vcpus.devices or vcpus.vm.controllers or vcpus.uefi or vcpus.space)
    assert (tree.devices, tree.space) == (made.devices, made.space)
    assert tree.vm.controllers == made.vm.controllers
    assert tree.uefi and [cell.vcpus for cell in tree.vm.cells] == [CpuSet([0]), CpuSet([1])]
    assert [cell.memory_bytes for cell in tree.vm.cells] == [192 * MIB] * 2
    words = shlex.join(stand_in_argv(tree, "n", FILES, "quiet", kvm=False))
    assert "-smp 2,sockets=2,dies=1,cores=1,threads=1" in words
    with_kvm = build_test_guest(opened, facts, SKYLAKE, "q35", host=host, has_ovmf=True, kvm=True)
    assert with_kvm.guests == (with_kvm,)
    named = build_test_guest(opened, facts, SKYLAKE, "q35", through_libvirt=True, kvm=False)
    assert named.guests == (named,) and not named.needs_qemu
    few = document(users_vm("2 GPUs").document)
    made = build_test_guest(few, build_vm(few), SKYLAKE, "q35", host=small_host(), kvm=False)
    assert made.guests == (made,)


def test_a_guest_of_few_emulated_vcpus_addresses_them_by_physical_destination() -> None:
    assert build_kernel_command(8, kvm=False).endswith(" possible_cpus=9")
    assert build_kernel_command(9, kvm=False) == build_kernel_command(4, kvm=True) == COMMAND


@pytest.mark.parametrize(
    "words",
    [
        ("-D", "/etc/cron.d/homenode"),
        ("-chardev", "file,id=x,path=/etc/cron.d/homenode"),
        ("-drive", "file=nbd:127.0.0.1:19999,if=none"),
        ("-hda", "json:{}"),
        ("-netdev", "tap,id=n,script=/tmp/evil"),
        ("-incoming", "exec:id"),
        ("-plugin", "/tmp/evil.so"),
        ("-readconfig", "/tmp/evil"),
        ("-object", "secret,id=s,file=/etc/shadow"),
        ("-device", "pcie-root-port,id=x,chassis=77,romfile=/etc/shadow"),
        ("-device", "pcie-root-port,id=x,chassis=77,bus=a,,romfile=/etc/shadow"),
        ("-device", "virtio-net-pci,romfile=/etc/shadow"),
        ("-device", '{"driver":"virtio-net-pci","romfile":"/etc/shadow"}'),
        ("-device", "vfio-pci,host=11:00.0,bus=x,,romfile=/etc/shadow,addr=0"),
        ("-object", "memory-backend-ram,id=m9,,mem-path=/etc/shadow,size=1G"),
        ("-fw_cfg", "name=opt/x,file=/etc/shadow"),
        ("-kernel", "/tmp/evil"),
    ],
)
def test_a_command_line_of_anybody_has_qemu_open_and_start_nothing(words: tuple[str, str]) -> None:
    plain = ("qemu-system-x86_64", "-machine", "q35", "-smp", "2", "-m", "2G")
    _, before = stand_in_of_command(plain, "vm.sh", "q35")
    made, booted = stand_in_of_command((*plain, *words), "vm.sh", "q35")
    more = [word for word in booted if word not in before]
    for option, value in zip(more[::2], more[1::2], strict=True):
        first, pairs = split_fields(value)
        assert option in ("-device", "-object")
        assert first in ("pcie-root-port", "virtio-serial-pci", "memory-backend-ram")
        assert {key for key, _ in pairs} <= {"id", "bus", "addr", "chassis", "size"}
    assert more or made.left_out
