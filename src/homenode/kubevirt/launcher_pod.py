"""LauncherPod: the pod that KubeVirt makes of a VMI, as far as its node's kubelet judges it.

Source: KubeVirt 1.8.4, virt-controller/services (renderresources.go, template.go) and
hypervisor/kvm: GetMemoryOverhead.
"""

from typing import Any

from homenode.kubevirt.demand import HOOK_ANNOTATION, demand_of
from homenode.kubevirt.vmi import Vmi
from homenode.pods.objects import down
from homenode.pods.pod import MEMORY, Container, Pod
from homenode.pods.quantity import parse_quantity
from homenode.units import GIB, MIB

_FIXED_MIB = 25 + 100 + 25 + 40 + 30
"""virt-launcher-monitor, virt-launcher, virtlogd, virtqemud, QEMU."""
_SIDECAR = {"cpu": 200, MEMORY: 64_000_000}


def launcher_pod(vmi: Vmi) -> Pod:
    """The virt-launcher pod: QEMU's container, and one for each hook. Raises ParseError.

    Memory is KubeVirt's estimate for QEMU and its own processes, and the guest's where it is not
    in huge pages.
    """
    demand = demand_of(vmi)
    overhead = _overhead_bytes(vmi, demand.vcpus, demand.passed > 0, demand.dedicated)
    guest = demand.memory_bytes or 0
    page = vmi.at("domain", "memory", "hugepages", "pageSize")
    memory = {MEMORY: overhead + (0 if page else guest)}
    if page:
        memory[f"hugepages-{page}"] = guest
    devices: dict[str, int] = {}
    for group in ("gpus", "hostDevices"):
        listed = vmi.at("domain", "devices", group)
        for device in listed if isinstance(listed, list) else ():
            name = down(device, "deviceName")
            if isinstance(name, str):
                devices[name] = devices.get(name, 0) + 1
    compute = Container(
        "compute", 1000 * demand.pus, memory, devices, is_guaranteed=demand.dedicated
    )
    hooks = [
        Container(f"hook-sidecar-{i}", _SIDECAR["cpu"], {MEMORY: _SIDECAR[MEMORY]})
        for i in range(1 if HOOK_ANNOTATION in vmi.annotations else 0)
    ]
    return Pod(f"virt-launcher-{vmi.name}", (compute, *hooks))


def _overhead_bytes(vmi: Vmi, vcpus: int, passed: bool, dedicated: bool) -> int:
    requested: Any = vmi.at("domain", "resources", "requests", "memory")
    tables = 0 if requested is None else parse_quantity(requested, "resources.memory") // 512
    mib = _FIXED_MIB + 8 * max(1, vcpus) + 8
    mib += 0 if vmi.at("domain", "devices", "autoattachGraphicsDevice") is False else 32
    mib += 128 if vmi.at("architecture") == "arm64" else 0
    mib += 53 if vmi.at("domain", "devices", "tpm") is not None else 0
    mib += 100 if dedicated else 0
    return tables + mib * MIB + (GIB if passed else 0)
