"""Demand: what a VMI asks of a node: CPUs, memory, pages and devices, as KubeVirt adds them up."""

from dataclasses import dataclass
from typing import Any

from homenode.kubevirt.vmi import Vmi
from homenode.pods.objects import down
from homenode.pods.quantity import parse_quantity

HOOK_ANNOTATION = "hooks.kubevirt.io/hookSidecars"
EVEN_ANNOTATION = "alpha.kubevirt.io/EmulatorThreadCompleteToEvenParity"
"""QEMU's own threads get two PUs where one would make the sum odd. KubeVirt puts it on VMIs itself
where the gate AlignCPUs is on and the KubeVirt CR has it.

Source: KubeVirt, virt-controller/services/renderresources.go, WithCPUPinning.
"""


@dataclass(frozen=True, slots=True)
class Demand:
    """vcpus: of the guest. threads: of its topology. pus: dedicated ones asked of kubelet, those of
    the emulator and of a pool of IOThreads included. memory_bytes, page_bytes: None where not said.
    most_memory_bytes: to which memory may be plugged in while it runs; None = it is not to grow.
    gpus: how many, of any kind. passed: functions of the host, GPUs and SR-IOV NICs among them.
    """

    vcpus: int
    threads: int
    pus: int
    dedicated: bool
    emulator_apart: bool
    mapped: bool
    memory_bytes: int | None
    most_memory_bytes: int | None
    page_bytes: int | None
    gpus: int
    passed: int
    hooked: bool


def demand_of(vmi: Vmi) -> Demand:
    """The demand of a VMI. Raises ParseError for a quantity that is none."""
    cpu = vmi.at("domain", "cpu")
    counts = [_count(down(cpu, name), name) for name in ("sockets", "cores", "threads")]
    vcpus = 1
    for count in counts:
        vcpus *= count or 1
    if not any(counts):
        asked = vmi.at("domain", "resources", "limits", "cpu") or vmi.at(
            "domain", "resources", "requests", "cpu"
        )
        vcpus = vcpus if asked is None else parse_quantity(asked, "resources.cpu")
    memory = vmi.at("domain", "memory", "guest")
    for kind in ("limits", "requests"):
        memory = memory or vmi.at("domain", "resources", kind, "memory")
    page = vmi.at("domain", "memory", "hugepages", "pageSize")
    gpus = _listed(vmi, "gpus")
    nics = [one for one in _listed(vmi, "interfaces") if down(one, "sriov") is not None]
    emulator_apart = bool(down(cpu, "isolateEmulatorThread"))
    pus = vcpus + _pool(vmi)
    if emulator_apart:
        pus += 2 if EVEN_ANNOTATION in vmi.annotations and pus % 2 == 0 else 1
    size = None if memory is None else parse_quantity(memory, "memory")
    most = vmi.at("domain", "memory", "maxGuest")
    most_bytes = None if most is None else parse_quantity(most, "memory.maxGuest")
    return Demand(
        vcpus=vcpus,
        threads=counts[2] or 1,
        pus=pus,
        dedicated=bool(down(cpu, "dedicatedCpuPlacement")),
        emulator_apart=emulator_apart,
        mapped=down(cpu, "numa", "guestMappingPassthrough") is not None,
        memory_bytes=size,
        most_memory_bytes=most_bytes if most_bytes and most_bytes > (size or 0) else None,
        page_bytes=None if page is None else parse_quantity(page, "memory.hugepages.pageSize"),
        gpus=len(gpus),
        passed=len(gpus) + len(_listed(vmi, "hostDevices")) + len(nics),
        hooked=HOOK_ANNOTATION in vmi.annotations,
    )


def _listed(vmi: Vmi, name: str) -> list[Any]:
    found = vmi.at("domain", "devices", name)
    return found if isinstance(found, list) else []


def _pool(vmi: Vmi) -> int:
    """IOThreads with PUs of their own."""
    if vmi.at("domain", "ioThreadsPolicy") != "supplementalPool":
        return 0
    threads = vmi.at("domain", "ioThreads", "supplementalPoolThreadCount")
    return 0 if threads is None else parse_quantity(threads, "ioThreads")


def _count(value: Any, name: str) -> int:
    return 0 if value is None else parse_quantity(value, f"cpu.{name}")
