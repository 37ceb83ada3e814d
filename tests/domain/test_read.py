"""Reading: every spelling that libvirt takes, and a plain message for what it does not."""

import codecs
import re

import pytest

from homenode.bdf import Bdf
from homenode.cpuset import CpuSet
from homenode.errors import InputError, ParseError
from homenode.units import GIB
from homenode.vm.domain.document import MAX_BYTES, MAX_DEPTH, MAX_ELEMENTS, parse_document
from homenode.vm.domain.read import read_kept, read_running_domain, read_vm
from homenode.vm.model import GuestAddress
from tests.domain_corpus import sample


def domain(inside: str = "", **swap: str) -> bytes:
    parts = {
        "memory": "<memory unit='GiB'>4</memory>",
        "vcpu": "<vcpu>4</vcpu>",
        "os": "<os><type arch='x86_64' machine='q35'>hvm</type></os>",
    } | swap
    return f"<domain type='kvm'><name>d</name>{''.join(parts.values())}{inside}</domain>".encode()


def test_a_guest_says_what_its_document_says() -> None:
    guest = read_vm(sample("earlier-layout"), "earlier")
    assert (guest.name, guest.domain_type, guest.architecture) == ("earlier", "kvm", "x86_64")
    assert guest.machine == "pc-q35-7.2"
    assert guest.is_q35
    assert guest.cpu_topology == (4, 1, 2, 1)
    assert guest.cell_vcpus == tuple(CpuSet.parse(s) for s in ("0-1", "2-3", "4-5", "6-7"))
    assert guest.firmware == "efi"
    assert [c.model for c in guest.controllers] == [
        "pcie-root",
        "pcie-root-port",
        "pcie-expander-bus",
        "pcie-root-port",
    ]
    assert (guest.controllers[2].bus_nr, guest.controllers[2].cell) == (200, 3)
    assert guest.hostdevs[0].address == GuestAddress(0, 3, 0, 0)
    assert GuestAddress(0, 0, 5, 0) in guest.addresses
    assert len(guest.addresses) == 4


def test_a_distance_that_is_not_given_is_that_of_the_other_direction() -> None:
    distances = "<distances><sibling id='1' value='21'/><sibling id='2' value='31'/></distances>"
    cells = [
        f"<cell id='{i}' cpus='{i}' memory='1'>{'' if i else distances}</cell>" for i in (0, 1, 2)
    ]
    guest = read_vm(domain(f"<cpu><numa>{''.join(cells)}</numa></cpu>"), "d")
    rows = (10, 21, 31), (21, 10, 20), (31, 20, 10)
    assert tuple(cell.distances for cell in guest.cells) == rows


@pytest.mark.parametrize(
    ("tune", "nodes"),
    [
        ("", (None, None)),
        ("<memory nodeset='2-3'/>", ("2-3", "2-3")),
        ("<memory nodeset='2-3'/><memnode cellid='1' nodeset='3'/>", ("2-3", "3")),
        ("<memnode cellid='1' nodeset='3'/>", (None, "3")),
    ],
)
def test_a_cell_lies_where_its_memnode_says_or_else_the_memory(
    tune: str, nodes: tuple[str | None, ...]
) -> None:
    cells = "".join(f"<cell id='{i}' cpus='{i}' memory='1' unit='GiB'/>" for i in range(2))
    xml = domain(f"<numatune>{tune}</numatune><cpu><numa>{cells}</numa></cpu>")
    expected = [CpuSet.parse(text) if text else CpuSet() for text in nodes]
    assert [cell.nodes for cell in read_vm(xml, "d").cells] == expected


@pytest.mark.parametrize(
    ("memory", "expected"),
    [
        ("<memory>4194304</memory>", 4 << 30),
        ("<memory unit='KiB'> 4194304\n</memory>", 4 << 30),
        ("<memory unit='b'>1024</memory>", 1024),
        ("<memory unit='b'>1025</memory>", 2048),
        ("<memory unit='KB'>17000000</memory>", 16601563 << 10),
        ("<memory unit='GB'>17</memory>", 16601563 << 10),
        ("<memory unit='bytes'>1024</memory>", 1024),
        ("<memory unit='KB'>8</memory>", 8192),
        ("<memory unit='k'>8</memory>", 8192),
        ("<memory unit='M'>8</memory>", 8 << 20),
        ("<memory unit='TiB'>1</memory>", 1 << 40),
        ("<memory unit='PiB'>1</memory>", 1 << 50),
        ("<memory unit='G'><!-- plenty -->8</memory>", 8 << 30),
        ("<memory unit='G'><![CDATA[8]]></memory>", 8 << 30),
    ],
)
def test_memory_takes_every_unit(memory: str, expected: int) -> None:
    assert read_vm(domain(memory=memory), "d").memory_bytes == expected


@pytest.mark.parametrize(
    ("cpu", "mode"),
    [
        ("", None),
        ("<cpu><topology sockets='1' dies='1' cores='4' threads='1'/></cpu>", None),
        ("<cpu><model>Skylake-Server</model></cpu>", "custom"),
        ("<cpu mode='custom'><model>Skylake-Server</model></cpu>", "custom"),
        ("<cpu mode='host-model'/>", "host-model"),
    ],
)
def test_a_cpu_without_mode_and_model_names_no_model(cpu: str, mode: str | None) -> None:
    assert read_vm(domain(cpu), "d").cpu_mode == mode


def test_vcpus_take_current_cpuset_and_white_space() -> None:
    guest = read_vm(domain(vcpu="<vcpu cpuset='0-3,^1' current='2'> 4 </vcpu>"), "d")
    assert (guest.vcpus, guest.vcpus_online) == (4, 2)
    states = "<vcpus><vcpu id='0' enabled='yes'/><vcpu id='2' enabled='no'/></vcpus>"
    assert read_vm(domain(states), "d").offline_vcpus == CpuSet([2])


def test_addresses_take_hexadecimal_octal_and_decimal_numbers() -> None:
    def source(address: str) -> Bdf:
        inside = (
            "<devices><hostdev mode='subsystem' type='pci'><source>"
            f"<address {address}/></source></hostdev></devices>"
        )
        return read_vm(domain(inside), "d").hostdevs[0].bdf

    assert source("domain='0x0000' bus='0x1a' slot='0x02' function='0x3'") == Bdf(0, 26, 2, 3)
    assert source("bus='26' slot='2' function='3'") == Bdf(0, 26, 2, 3)
    assert source("bus='032' slot='02'") == Bdf(0, 26, 2, 0)
    assert source("domain='0x10000' bus='0'") == Bdf(65536, 0, 0, 0)


def test_a_virtual_function_of_an_interface_needs_no_type_of_its_address() -> None:
    inside = "<devices><interface type='hostdev'><source><address bus='26'/></source></interface>"
    (hostdev,) = read_vm(domain(f"{inside}</devices>"), "d").hostdevs
    assert (hostdev.bdf, hostdev.managed) == (Bdf(0, 26, 0, 0), True)


@pytest.mark.parametrize(("model", "count"), [("", 1), ("vfio-pci", 1), ("vfio-ccw", 0)])
def test_a_mediated_device_is_a_pci_device_unless_its_model_is_another(
    model: str, count: int
) -> None:
    named = f" model='{model}'" if model else ""
    inside = (
        f"<devices><hostdev type='mdev'{named}><source>"
        "<address uuid='c2177883-f1bb-47f0-914d-32a22e3a8804'/></source></hostdev></devices>"
    )
    assert len(read_vm(domain(inside), "d").mediated) == count


def test_an_address_of_zeros_lets_libvirt_choose() -> None:
    inside = (
        "<devices><hostdev mode='subsystem' type='pci'><source><address bus='0x19'/></source>"
        "<address type='pci' domain='0' bus='0' slot='0' function='0'/></hostdev></devices>"
    )
    guest = read_vm(domain(inside), "d")
    assert guest.hostdevs[0].address is None
    assert guest.addresses == ()


def test_controllers_without_an_index_get_the_lowest_free_one() -> None:
    guest = read_vm(sample("gpu-with-audio-and-nics"), "g")
    assert [(c.index, c.model) for c in guest.controllers] == [
        (0, "pcie-root"),
        (1, "pcie-root-port"),
    ]
    port = "<controller type='pci' index='1' model='pcie-root-port'/>"
    root = "<controller type='pci' index='0' model='pcie-root'><pcihole64>1</pcihole64>"
    guest = read_vm(domain(f"<devices>{port}{root}</controller></devices>"), "d")
    assert guest.pcihole64_bytes == 1024


def test_devices_that_the_guest_does_not_see_are_not_its_own() -> None:
    guest = read_vm(sample("gpu-with-audio-and-nics"), "g")
    assert [str(h.bdf) for h in guest.hostdevs] == [
        "0000:1a:10.3",
        "0000:19:00.0",
        "0000:19:00.1",
    ]


def test_the_architecture_is_the_emulators_where_none_is_named() -> None:
    for name in ("virt", "virt-8.0"):
        machine = f"<os><type machine='{name}'>hvm</type></os>"
        assert read_vm(domain(os=machine), "d").architecture == "aarch64"
    assert read_vm(sample("no-cpu-no-arch"), "d").architecture == "x86_64"
    emulator = "<devices><emulator>/usr/bin/qemu-system-riscv64</emulator></devices>"
    assert read_vm(domain(emulator, os="<os><type>hvm</type></os>"), "d").architecture == (
        "riscv64"
    )


@pytest.mark.parametrize(
    ("inside", "kind"),
    [
        ("<launchSecurity type='sev-snp'><policy>0x30000</policy></launchSecurity>", "sev-snp"),
        ("<launchSecurity type='tdx'/>", "tdx"),
        ("<launchSecurity/>", "unknown"),
        ("", None),
    ],
)
def test_launch_security_is_reported(inside: str, kind: str | None) -> None:
    assert read_vm(domain(inside), "d").launch_security == kind


def test_huge_pages_of_any_spelling() -> None:
    def pages(inside: str) -> int | None:
        return read_vm(domain(f"<memoryBacking>{inside}</memoryBacking>"), "d").page_bytes

    assert pages("") is None
    assert pages("<hugepages/>") == 0
    assert pages("<hugepages><page size='1' unit='G' nodeset='0'/></hugepages>") == GIB
    assert pages("<hugepages><page size='2048'/></hugepages>") == 2 << 20
    several = "<page size='1' unit='G' nodeset='0'/><page size='2048'/>"
    assert pages(f"<hugepages>{several}</hugepages>") == GIB
    cell = "<cell id='{0}' cpus='{0}' memory='1' unit='GiB'/>"
    numa = f"<cpu><numa>{cell.format(0)}{cell.format(1)}</numa></cpu>"
    for inside, expected in (
        ("", [0, 0]),
        ("<page size='1' unit='G' nodeset='0'/>", [GIB, None]),
        (several, [GIB, 2 << 20]),
    ):
        backing = f"<memoryBacking><hugepages>{inside}</hugepages></memoryBacking>"
        cells = read_vm(domain(backing + numa), "d").cells
        assert [cell.page_bytes for cell in cells] == expected


@pytest.mark.parametrize(
    ("model", "source", "follows"),
    [
        ("dimm", "", [(True, False)]),
        ("dimm", "<nodemask>1</nodemask>", [(False, True)]),
        ("nvdimm", "<path>/dev/dax0.0</path>", [(False, False)]),
        ("sgx-epc", "", []),
    ],
)
def test_a_memory_device_follows_its_cell_unless_its_source_says_else(
    model: str, source: str, follows: list[tuple[bool, bool]]
) -> None:
    device = f"<memory model='{model}'><source>{source}</source>"
    target = "<target><size unit='GiB'>1</size></target></memory>"
    guest = read_vm(domain(f"<devices>{device}{target}</devices>"), "d")
    assert [(d.follows_cell, d.has_nodemask) for d in guest.memory_devices] == follows


def test_elements_next_to_the_layouts_are_kept_and_pins_are_not_among_them() -> None:
    kept = read_kept(parse_document(sample("pins-with-comments"), "p"))
    assert "shares 2048" in kept
    assert [line for line in kept if re.match("vcpupin|emulatorpin|iothreadpin|iommu", line)] == []


def test_what_else_the_planner_asks_for() -> None:
    guest = read_vm(sample("qemu-commandline"), "q")
    assert guest.has_qemu_commandline
    assert guest.firmware == "efi"
    guest = read_vm(sample("dimms-and-shared-memory"), "d")
    assert guest.memory_access_shared
    assert guest.has_dimms
    assert (guest.memory_bytes, guest.max_memory_bytes) == (8 * GIB, 64 * GIB)
    less = sample("dimms-and-shared-memory").replace(b">10</currentMemory>", b">9</currentMemory>")
    assert read_vm(less, "d").ballooned_bytes == GIB
    none = less.replace(b">9</currentMemory>", b">0</currentMemory>")  # all, as in libvirt
    assert read_vm(none, "d").ballooned_bytes == read_vm(domain(), "d").ballooned_bytes == 0
    assert read_vm(sample("pins-with-comments"), "p").iothread_ids == (2, 7)
    chosen = "<os firmware='efi'><type machine='q35'>hvm</type><loader secure='no'/></os>"
    assert read_vm(domain(os=chosen), "d").firmware == "efi"
    clusters = "<cpu><topology sockets='1' clusters='2' cores='2' threads='1'/></cpu>"
    assert read_vm(domain(clusters), "d").cpu_topology == (1, 1, 4, 1)
    of_policy = {"force": True, "require": True, "forbid": False, "optional": None}
    for policy, is_on in of_policy.items():
        cpu = f"<cpu mode='maximum'><feature policy='{policy}' name='topoext'/></cpu>"
        assert read_vm(domain(cpu), "d").topoext is is_on
    binding = "<numatune>{}<memnode cellid='1' mode='strict' nodeset='1'/></numatune>".format(
        "<memnode cellid='0' mode='preferred' nodeset='0'/>"
    )
    assert read_vm(domain(binding), "d").bound_nodes is None


@pytest.mark.parametrize(
    ("xml", "said"),
    [
        (b"", "vm.xml: the file is empty"),
        (b"  \n", "virsh dumpxml"),
        (b"<domain", "expected well-formed XML"),
        (b"<domain type='kvm'></domain>trailing", "well-formed"),
        (b"<network/>", "expected <domain>, found <network>"),
        (b"<domstatus><domain type='kvm'/></domstatus>", "holds a <domain> at line 1"),
        (b"<domain type='kvm'/>", "missing <vcpu> with the number of vCPUs"),
        (domain(vcpu=""), "<vcpu>8</vcpu>"),
        (domain(vcpu="<vcpu>many</vcpu>"), "expected the number of vCPUs, a whole number"),
        (domain(vcpu="<vcpu>0</vcpu>"), "1 to 4096 vCPUs"),
        (domain(vcpu="<vcpu>99999999</vcpu>"), "1 to 4096 vCPUs"),
        (domain(vcpu="<vcpu current='5'>4</vcpu>"), "current 5"),
        (domain(memory=""), "missing <memory>"),
        (domain(memory="<memory unit='XiB'>1</memory>"), "unit 'XiB'"),
        (domain(memory="<memory>0</memory>"), "expected <memory> above 0, found 0"),
        (
            domain(
                "<devices><memory><target><size unit='GiB'>4</size></target></memory></devices>"
            ),
            "memory devices alone 4294967296",
        ),
        (domain().replace(b"<name>d</name>", b""), "a domain with a <name>"),
        (domain().replace(b" type='kvm'", b""), "<domain> with type="),
        (domain("<cpu><topology sockets='0' cores='1' threads='1'/></cpu>"), "sockets from 1"),
        (domain("<iothreads>x</iothreads>"), "IOThreads"),
        (
            domain("<devices/>\n<devices/>"),
            "vm.xml:2: expected one <devices> in <domain>, found 2, the first at line 1",
        ),
        (domain("<cpu><numa/><numa/></cpu>"), "expected one <numa> in <cpu>"),
        (
            domain(
                "<devices><hostdev type='pci'><source><address bus='0x1g'/></source></hostdev>"
                "</devices>"
            ),
            "a PCI bus, such as 0x1f or 31",
        ),
        (
            domain(
                "<devices><hostdev type='pci'><source><address bus='0x100'/></source></hostdev>"
                "</devices>"
            ),
            "a PCI bus below 0x100",
        ),
        *(
            (
                domain(
                    f"<devices><hostdev type='pci'><source><address {name}='{over}'/></source>"
                    "</hostdev></devices>"
                ),
                f"a PCI {name} below {over}",
            )
            for name, over in (("slot", "0x20"), ("function", "0x8"))
        ),
    ],
)
def test_bad_input_says_what_was_expected_and_found(xml: bytes, said: str) -> None:
    with pytest.raises(InputError) as raised:
        read_vm(xml, "vm.xml")
    assert str(raised.value).startswith("vm.xml")
    assert said in str(raised.value)


def test_entities_and_external_references_are_refused_unread() -> None:
    bomb = b'<!DOCTYPE d [<!ENTITY a "aaaaaaaaaa"><!ENTITY b "&a;&a;&a;">]>' + domain()
    with pytest.raises(InputError, match="expected no DOCTYPE"):
        read_vm(bomb, "vm.xml")
    outside = b'<!DOCTYPE d SYSTEM "http://example.org/d.dtd">' + domain()
    with pytest.raises(InputError, match="external references are rejected"):
        read_vm(outside, "vm.xml")
    with pytest.raises(ParseError, match="undefined entity"):
        read_vm(domain("<title>&mine;</title>"), "vm.xml")


def test_size_and_depth_are_bounded() -> None:
    with pytest.raises(InputError, match="at most 4194304 bytes"):
        read_vm(b" " * (MAX_BYTES + 1), "vm.xml")
    deep = b"<a>" * (MAX_DEPTH + 1) + b"</a>" * (MAX_DEPTH + 1)
    with pytest.raises(InputError, match="levels"):
        parse_document(deep, "vm.xml")
    many = "".join(f"<a{i % 5}/>" for i in range(MAX_ELEMENTS))
    with pytest.raises(InputError, match="20000 elements"):
        parse_document(f"<domain>{many}</domain>".encode(), "vm.xml")


def test_a_host_device_given_twice_is_refused() -> None:
    one = "<hostdev type='pci'><source><address bus='0x19'/></source></hostdev>"
    with pytest.raises(InputError, match=r"0000:19:00.0 once, found it twice"):
        read_vm(domain(f"<devices>{one}{one}</devices>"), "vm.xml")
    uuid = "c2177883-f1bb-47f0-914d-32a22e3a8804"
    one = f"<hostdev type='mdev'><source><address uuid='{uuid}'/></source></hostdev>"
    with pytest.raises(InputError, match=f"{uuid} once, found it twice"):
        read_vm(domain(f"<devices>{one}{one}</devices>"), "vm.xml")


@pytest.mark.parametrize("encoding", ["utf-7", "utf-32", "ebcdic", "shift_jis", "idna"])
def test_encodings_that_are_not_plain_are_refused(encoding: str) -> None:
    xml = f"<?xml version='1.0' encoding='{encoding}'?>".encode() + domain()
    with pytest.raises(ParseError, match="convert the definition to UTF-8"):
        read_vm(xml, "vm.xml")


def test_a_byte_order_mark_is_kept() -> None:
    document = parse_document(codecs.BOM_UTF8 + domain(), "vm.xml")
    assert document.to_bytes().startswith(codecs.BOM_UTF8)


def test_a_running_domain_says_what_it_uses() -> None:
    in_use = read_running_domain(sample("earlier-layout"), running=True)
    assert in_use.running
    assert in_use.vcpu_pins[4] == CpuSet([32])
    assert in_use.emulator_pus == CpuSet([8, 9])
    assert in_use.memory_bound
    assert in_use.memory_by_node == ((0, 4 * GIB), (1, 4 * GIB))
    assert in_use.devices == (Bdf.parse("0000:9b:00.0"),)


def test_memory_bound_to_nodes_together_counts_as_spread_over_them() -> None:
    tune = "<numatune><memory mode='interleave' nodeset='0,2-3'/></numatune>"
    in_use = read_running_domain(domain(tune, memory="<memory unit='KiB'>3145729</memory>"), True)
    assert in_use.memory_bound
    assert sum(size for _, size in in_use.memory_by_node) == in_use.memory_bytes
    assert [node for node, _ in in_use.memory_by_node] == [0, 2, 3]


def test_memory_that_may_spill_or_float_is_not_bound() -> None:
    preferred = "<numatune><memory mode='preferred' nodeset='1'/></numatune>"
    in_use = read_running_domain(domain(preferred), running=True)
    assert (in_use.memory_bound, in_use.memory_by_node) == (False, ((1, 4 * GIB),))
    in_use = read_running_domain(domain(), running=False)
    assert (in_use.memory_bound, in_use.memory_by_node) == (False, ())
    numad = "<numatune><memory mode='strict' placement='auto'/></numatune>"
    assert not read_running_domain(domain(numad), running=True).memory_bound


def test_a_vcpu_without_a_pin_has_the_set_of_the_domain_or_floats() -> None:
    tune = "<cputune><vcpupin vcpu='1' cpuset='7'/></cputune>"
    in_use = read_running_domain(domain(tune), running=True)
    assert in_use.vcpu_pins == (None, CpuSet([7]), None, None)
    in_use = read_running_domain(domain(tune, vcpu="<vcpu cpuset='0-3'>2</vcpu>"), running=True)
    assert in_use.vcpu_pins == (CpuSet.parse("0-3"), CpuSet([7]))
    assert in_use.emulator_pus == CpuSet.parse("0-3")
    threads = "<iothreads>2</iothreads><cputune><iothreadpin iothread='1' cpuset='7'/></cputune>"
    in_use = read_running_domain(domain(threads, vcpu="<vcpu cpuset='0-3'>2</vcpu>"), running=True)
    assert in_use.iothread_pus == (CpuSet([7]), CpuSet.parse("0-3"))


def test_a_domain_holds_devices_that_its_guest_does_not_see() -> None:
    in_use = read_running_domain(sample("gpu-with-audio-and-nics"), running=True)
    assert Bdf.parse("0000:19:00.2") in in_use.devices


@pytest.mark.parametrize("kind", ["xen", "vmware", "lxc", "bhyve", "vbox", "hyperv"])
def test_documents_of_other_hypervisors_are_refused_by_name(kind: str) -> None:
    document = f"<domain type='{kind}'><name>vm</name><memory>4</memory><vcpu>1</vcpu></domain>"
    with pytest.raises(InputError, match=rf"expected a domain of QEMU .*\(type {kind}\)") as error:
        read_vm(document.encode(), "vm.xml")
    assert error.value.hint and error.value.exit_code == 2
