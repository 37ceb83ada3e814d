"""What tools add to sysfs: links between GPUs, versions, libvirt's view and its domains."""

from collections.abc import Mapping

import pytest

from homenode.bdf import Bdf
from homenode.cpuset import CpuSet
from homenode.errors import InputError
from homenode.findings import NO_VMS, list_unread_vms
from homenode.machine.discover.host import discover
from homenode.machine.pci import DeviceLink, LinkKind
from homenode.machine.topology import Host, MemoryKind, RunningDomain
from homenode.vm.domain.read import read_running_domain
from tests.sysfs_trees import NODE, cpu_files, pci_function, snapshot

TWO_GPUS = pci_function("0000:01:00.0", "030200", "10de:2330") | pci_function(
    "0000:02:00.0", "030200", "10de:2330", node=1
)
TWO_AMD = pci_function("0000:01:00.0", "120000", "1002:74a1") | pci_function(
    "0000:02:00.0", "120000", "1002:74a1", node=1
)
FIRST, SECOND = Bdf.parse("01:00.0"), Bdf.parse("02:00.0")
MATRIX = (
    "\tGPU0\tGPU1\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID\n"
    "GPU0\t X \tNV18\t0-1,4-5\t0\tN/A\n"
    "GPU1\tNV18\t X \t2-3,6-7\t1\tN/A\n"
)
CAPABILITIES = """
<capabilities><host><topology><cells num='2'>
<cell id='0'><memory unit='KiB'>1024</memory>
<distances><sibling id='0' value='10'/><sibling id='1' value='21'/></distances>
<cpus num='4'>
<cpu id='0' socket_id='0' core_id='0' siblings='0,4'/><cpu id='1' siblings='1,5'/>
<cpu id='4' siblings='0,4'/><cpu id='5' siblings='1,5'/></cpus></cell>
<cell id='1'><memory unit='KiB'>1024</memory>
<cpus num='4'><cpu id='2'/><cpu id='3'/><cpu id='6'/><cpu id='7'/></cpus></cell>
</cells></topology></host></capabilities>
"""


def _host(files: Mapping[str, str], **outputs: str) -> Host:
    commands = {name.replace("_", "-"): text for name, text in outputs.items()}
    return discover(snapshot({**cpu_files(), **files}, commands=commands))


def _reasons(host: Host) -> dict[str, str]:
    return {gap.subject: gap.reason for gap in host.gaps}


def test_nvlinks_are_between_the_gpus_of_the_matrix() -> None:
    host = _host(TWO_GPUS, nvidia_smi_topo=MATRIX)
    assert host.links == (DeviceLink(LinkKind.NVLINK, FIRST, SECOND, None, 18),)


def test_gpus_are_numbered_as_nvidia_smi_numbers_them() -> None:
    query = (
        "<nvidia_smi_log><gpu id='00000000:02:00.0'><product_name>Two</product_name>"
        "<platformInfo><module_id>3</module_id></platformInfo></gpu>"
        "<gpu id='00000000:01:00.0'><product_name>One</product_name></gpu></nvidia_smi_log>"
    )
    host = _host(TWO_GPUS, nvidia_smi_topo=MATRIX, nvidia_smi_query=query)
    assert [device.name for device in host.pci_devices] == ["One", "Two"]
    assert [device.module_id for device in host.pci_devices] == [None, 3]
    # The matrix has GPU0 on node 0, which sysfs says of the GPU that is number 1.
    assert "says 0, sysfs says 1" in _reasons(host)["node of 0000:02:00.0"]


def test_a_matrix_of_other_gpus_gives_no_links() -> None:
    files = TWO_GPUS | pci_function("0000:03:00.0", "030200", "10de:2330")
    host = _host(files, nvidia_smi_topo=MATRIX)
    assert host.links == ()
    assert "lists 2 GPUs; 3 in the PCI tree" in _reasons(host)["NVLinks"]


@pytest.mark.parametrize("output", ["", "garbage\n"])
def test_a_matrix_that_is_none_is_a_gap(output: str) -> None:
    assert "NVLinks" in _reasons(_host(TWO_GPUS, nvidia_smi_topo=output))


def test_several_gpus_without_a_tool_are_a_gap() -> None:
    assert "NVLinks" in _reasons(_host(TWO_GPUS))
    assert "xGMI links" in _reasons(_host(TWO_AMD))


def test_gpu_memory_nodes_come_from_nvidia_smi_where_the_driver_is_silent() -> None:
    files = TWO_GPUS | {
        f"{NODE}/online": "0-2\n",
        f"{NODE}/node2/cpulist": "\n",
        f"{NODE}/node2/meminfo": "Node 2 MemTotal: 4096 kB\nNode 2 MemFree: 4096 kB\n",
    }
    host = _host(files, nvidia_smi_topo=MATRIX.replace("N/A", "2", 1))
    assert (host.nodes[2].memory_kind, host.nodes[2].gpu) == (MemoryKind.GPU, FIRST)
    files["/proc/driver/nvidia/gpus/0000:02:00.0/numa_status"] = "Node: 2\n"
    files["/proc/driver/nvidia/gpus/0000:01:00.0/numa_status"] = "Node: -1\n"
    host = _host(files, nvidia_smi_topo=MATRIX.replace("N/A", "2", 1))
    assert host.nodes[2].gpu == SECOND
    assert "GPU of node 2" in _reasons(host)


@pytest.mark.parametrize("device", ["2342", "2348"])
def test_a_grace_hopper_gpu_has_a_c2c_link_to_its_cpus_node(device: str) -> None:
    files = pci_function("0000:01:00.0", "030200", f"10de:{device}", node=1)
    assert _host(files).links == (DeviceLink(LinkKind.C2C, FIRST, None, 1),)  # type: ignore[arg-type]
    off = (
        "<nvidia_smi_log><gpu id='00000000:01:00.0'><c2c_mode>Disabled</c2c_mode></gpu>"
        "</nvidia_smi_log>"
    )
    assert _host(files, nvidia_smi_query=off).links == ()


def test_versions_are_those_of_the_running_daemon() -> None:
    text = (
        "Using library: libvirt 9.0.0\nUsing API: QEMU 9.0.0\nRunning hypervisor: QEMU 7.2.22\n"
        "Running against daemon: 9.0.1\n"
    )
    settings = _host({}, virsh_version=text.replace("Running against daemon: 9.0.1\n", "")).settings
    assert (settings.libvirt_version, settings.qemu_version) == ((9, 0, 0), (7, 2, 22))
    settings = _host({}, qemu_version="QEMU emulator version 8.2.1\n").settings
    assert (settings.libvirt_version, settings.qemu_version) == (None, (8, 2, 1))
    assert "QEMU version" in _reasons(_host({}, qemu_version="no\n"))


def test_libvirts_view_that_agrees_adds_no_gap() -> None:
    assert _host({}, virsh_capabilities=CAPABILITIES).gaps == _host({}).gaps


@pytest.mark.parametrize(
    ("old", "new", "subject", "reason"),
    [
        ("<cell id='1'>", "<cell id='5'>", "NUMA nodes", "libvirt has 0, 5"),
        ("<cpu id='7'/>", "", "CPUs of node 1", "libvirt has 2-3,6, sysfs has 2-3,6-7"),
        ("'0,4'", "'0-1,4'", "SMT siblings of CPU 0", "libvirt has 0-1,4, sysfs has 0,4"),
        ("'21'", "'31'", "distance from node 0 to node 1", "libvirt has 31, sysfs has 21"),
        ("</host>", "", "libvirt's view of the host", "well-formed"),
    ],
)
def test_libvirts_view_that_differs_is_a_gap(old: str, new: str, subject: str, reason: str) -> None:
    host = _host({}, virsh_capabilities=CAPABILITIES.replace(old, new))
    assert reason in _reasons(host)[subject]


DOMAINS = """<domains>
<domain type='kvm' id='3'><name>busy</name><memory unit='GiB'>1</memory><vcpu>2</vcpu>
<os><type arch='x86_64' machine='q35'>hvm</type></os>
<cputune><vcpupin vcpu='0' cpuset='0'/><vcpupin vcpu='1' cpuset='4'/></cputune></domain>
<domain type='kvm'><name>asleep</name><memory unit='GiB'>1</memory><vcpu>1</vcpu>
<os><type arch='x86_64' machine='q35'>hvm</type></os></domain>
<domain type='kvm'><name>broken</name></domain>
</domains>"""


def test_domains_are_read_one_by_one_and_a_broken_one_is_a_gap() -> None:
    host = discover(snapshot(cpu_files(), commands={"virsh-domains": DOMAINS}), read_running_domain)
    assert [(domain.name, domain.running) for domain in host.domains] == [
        ("asleep", False),
        ("busy", True),
    ]
    assert host.domains[1].vcpu_pins == (CpuSet((0,)), CpuSet((4,)))
    assert "shut-off VM broken" in _reasons(host)


def test_domains_that_no_one_reads_are_a_gap() -> None:
    assert NO_VMS in _reasons(_host({}, virsh_domains=DOMAINS))
    assert list_unread_vms(_host({}).gaps)
    silent = _host({}, virsh_domains="")
    assert NO_VMS not in _reasons(silent) and not list_unread_vms(silent.gaps)


def test_a_reader_that_refuses_does_not_stop_discovery() -> None:
    def refuse(xml: bytes, running: bool, source: str) -> RunningDomain:
        raise InputError(f"{source}: no")

    host = discover(snapshot(cpu_files(), commands={"virsh-domains": DOMAINS}), refuse)
    assert host.domains == () and _reasons(host)["running VM busy"] == "domain busy: no"
