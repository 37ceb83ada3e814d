"""Documents and VMIs as KubeVirt gives them to its hook, and hosts to try them on."""

import json
from collections.abc import Mapping, Sequence
from functools import cache
from xml.etree import ElementTree

from homenode.cpuset import CpuSet
from homenode.machine.description.parse import load_shipped
from homenode.machine.snapshot.protocol import MemorySnapshot
from homenode.units import GIB
from tests.rendered.machine import render

IBM = "hgx-a100-ibm"
IBM_GPUS = tuple(f"{bus:02x}:00.0" for bus in (0x07, 0x08, 0x47, 0x48, 0x87, 0x88, 0xC7, 0xC8))
"""GPUs of the shipped host, by which the tests check themselves."""

_HEAD = (
    '<domain type="{kind}" xmlns:qemu="http://libvirt.org/schemas/domain/qemu/1.0">'
    "<name>{name}</name><uuid>{uuid}</uuid>"
    '<memory unit="b">{memory}</memory>{backing}'
    '<vcpu placement="static">{vcpus}</vcpu>'
    "<iothreads>1</iothreads>{tune}"
    '<os><type arch="x86_64" machine="{machine}">hvm</type><smbios mode="sysinfo"></smbios></os>'
    '<sysinfo type="smbios"><system><entry name="manufacturer">KubeVirt</entry></system>'
    "</sysinfo><features><acpi></acpi></features>"
    '<cpu mode="host-model"><topology sockets="1" cores="{vcpus}" threads="1"></topology>'
    "{numa}</cpu>"
    '<devices><controller type="usb" index="0" model="none"></controller>'
    '<controller type="virtio-serial" index="0" model="virtio-non-transitional"></controller>'
)
_TAIL = (
    '<serial type="unix"><target port="0"></target>'
    '<source mode="bind" path="/var/run/kubevirt-private/{uuid}/virt-serial0"></source></serial>'
    '<rng model="virtio-non-transitional"><backend model="random">/dev/urandom</backend></rng>'
    '<memballoon model="none"></memballoon></devices></domain>'
)


def document(
    devices: Sequence[str],
    *,
    pins: Sequence[Sequence[int]] = ((0, 1), (4, 5)),
    nodes: Sequence[str] | None = ("0", "1"),
    addresses: Mapping[str, str] | None = None,
    controllers: str = "",
    memory_bytes: int = 8 * GIB,
    machine: str = "q35",
    kind: str = "kvm",
    name: str = "default_gpu-vm",
    uuid: str = "6f2d1c4e-9d3b-5b53-8f11-6a2f0a6d4c11",
    distances: bool = False,
    hugepages: bool = True,
) -> str:
    """A domain on one line, as KubeVirt marshals it before it is defined.

    pins: CPUs of the vCPUs of each cell, () for a flat guest. nodes: <memnode> of each cell, None
    for none. addresses: guest address of some devices, as XML attributes.
    """
    every_pu = [pu for pus in pins for pu in pus]
    tune = "".join(
        f'<vcpupin vcpu="{vcpu}" cpuset="{pu}"></vcpupin>' for vcpu, pu in enumerate(every_pu)
    )
    emulator = "" if pins else '<emulatorpin cpuset="0"></emulatorpin>'
    tune = f"<cputune>{tune}{emulator}</cputune>"
    if pins and nodes is not None:
        every = ",".join(sorted(set(nodes)))
        tune += f'<numatune><memory mode="strict" nodeset="{every}"></memory>'
        for cell, node in enumerate(nodes):
            tune += f'<memnode cellid="{cell}" mode="strict" nodeset="{node}"></memnode>'
        tune += "</numatune>"
    numa, vcpu = "", 0
    for cell, pus in enumerate(pins):
        siblings = "".join(
            f'<sibling id="{to}" value="{10 if to == cell else 21}"></sibling>'
            for to in range(len(pins))
        )
        stated = f"<distances>{siblings}</distances>" if distances else ""
        listed = ",".join(map(str, range(vcpu, vcpu + len(pus))))
        vcpu += len(pus)
        each = memory_bytes // len(pins)
        numa += f'<cell id="{cell}" cpus="{listed}" memory="{each}" unit="b">{stated}</cell>'
    pages = '<memoryBacking><hugepages><page size="2" unit="M"></page></hugepages></memoryBacking>'
    head = _HEAD.format(
        **{"kind": kind, "name": name, "uuid": uuid, "machine": machine, "memory": memory_bytes},
        **{"vcpus": len(every_pu) or 4, "tune": tune, "backing": pages if hugepages else ""},
        numa=f"<numa>{numa}</numa>" if pins else "",
    )
    inside = "".join(hostdev(bdf, (addresses or {}).get(bdf)) for bdf in devices)
    return head + controllers + inside + _TAIL.format(uuid=uuid)


def hostdev(bdf: str, address: str | None = None) -> str:
    """A passed-through function as KubeVirt writes it."""
    full = bdf if bdf.count(":") == 2 else f"0000:{bdf}"
    domain, bus, rest = full.split(":")
    slot, function = rest.split(".")
    at = "" if address is None else f'<address type="pci" {address}></address>'
    return (
        '<hostdev type="pci" managed="no" mode="subsystem"><source>'
        f'<address type="pci" domain="0x{domain}" bus="0x{bus}" slot="0x{slot}" '
        f'function="0x{function}"></address></source>'
        f'<alias name="ua-gpu-{bdf.replace(":", "-")}"></alias>{at}</hostdev>'
    )


def ibm_document(**changes: object) -> str:
    """The article's VM, reconstructed from what it prints and no more: 8 GPUs of 2 nodes, guest
    CPUs up to 199, GPUs without a place. Cells, pins and memory are assumed: 100 vCPUs a node."""
    given: dict[str, object] = {
        "pins": (
            tuple(range(4, 64)) + tuple(range(128, 168)),
            tuple(range(64, 164 - 36)) + tuple(range(192, 228)),
        ),
        "memory_bytes": 512 * GIB,
    }
    return document(IBM_GPUS, **{**given, **changes})  # type: ignore[arg-type]


def defined_again(
    before: str, printed: str, *, knows_targets: bool = False, knows_initiators: bool = False
) -> str:
    """The document of KubeVirt's second call of the hook, which it makes where it keeps ports for
    NICs: as it was before the first, with the devices that libvirt printed after it, as far as
    KubeVirt's types hold them.

    Source: withNetworkIfacesResources in virtwrap/nichotplug.go; Controller and HostDevice in
    virtwrap/api/schema.go, which know <target> of controllers since PCINUMAAwareTopology, and
    <acpi> since GraceIOVirtualization.
    """
    document = ElementTree.fromstring(before)
    devices = ElementTree.fromstring(printed).find("devices")
    assert devices is not None
    lost = {"controller": {"model"}, "hostdev": {"rom"}}
    if not knows_targets:
        lost["controller"].add("target")
    if not knows_initiators:
        lost["hostdev"].add("acpi")
    for device in devices:
        for child in list(device):
            if child.tag in lost.get(device.tag, ()):
                device.remove(child)
    for target in devices.iterfind("controller/target"):
        target.attrib = {name: text for name, text in target.attrib.items() if name == "busNr"}
    at = [child.tag for child in document].index("devices")
    document[at] = devices
    return ElementTree.tostring(document, encoding="unicode")


def vmi(
    *,
    name: str = "gpu-vm",
    annotations: Mapping[str, str] | None = None,
    interfaces: Sequence[Mapping[str, object]] = (),
    gpus: int = 8,
    **cpu: object,
) -> str:
    """A VMI as JSON."""
    return json.dumps(
        {
            "apiVersion": "kubevirt.io/v1",
            "kind": "VirtualMachineInstance",
            "metadata": {"name": name, "namespace": "default", "annotations": annotations or {}},
            "spec": {
                "domain": {
                    "cpu": {"cores": 200, "dedicatedCpuPlacement": True, **cpu},
                    "devices": {
                        "gpus": [
                            {"name": f"gpu{i}", "deviceName": "nvidia.com/A100"}
                            for i in range(gpus)
                        ],
                        "interfaces": list(interfaces),
                    },
                }
            },
        }
    )


@cache
def shipped(name: str) -> MemorySnapshot:
    """The /sys of a shipped host."""
    return render(load_shipped(name))


def small_host(
    device_nodes: Mapping[str, int],
    pus: Sequence[str] = ("0-3", "4-7"),
    distances: Sequence[str] = ("10 21", "21 10"),
) -> MemorySnapshot:
    """A host of a few nodes, each function below a root port of its own; node -1 is none told."""
    files = {"/sys/devices/system/node/online": f"0-{len(pus) - 1}\n"}
    links: dict[str, str] = {}
    for node, (listed, row) in enumerate(zip(pus, distances, strict=True)):
        directory = f"/sys/devices/system/node/node{node}"
        files |= {f"{directory}/cpulist": f"{listed}\n", f"{directory}/distance": f"{row}\n"}
    for number, (short, node) in enumerate(device_nodes.items()):
        bdf = f"0000:{short}"
        port = f"/sys/devices/pci0000:{0x40 + number:02x}/0000:{0x40 + number:02x}:01.0"
        directory = f"{port}/{bdf}"
        local = pus[node] if node >= 0 else str(CpuSet.parse(",".join(pus)))
        files |= {
            f"{port}/class": "0x060400\n",
            f"{directory}/class": "0x030200\n",
            f"{directory}/vendor": "0x10de\n",
            f"{directory}/device": "0x20b0\n",
            f"{directory}/numa_node": f"{node}\n",
            f"{directory}/local_cpulist": f"{local}\n",
        }
        links[f"/sys/bus/pci/devices/{bdf}"] = f"../../../devices/{directory.split('/', 3)[3]}"
    return MemorySnapshot("a small host", files, links)
