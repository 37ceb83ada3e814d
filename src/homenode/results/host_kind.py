"""Host kind: a text that is equal for machines of one kind."""

from homenode.pci import DeviceKind
from homenode.topology import Host


def host_kind(host: Host) -> str:
    """Packages, processor, GPUs: "2x Intel(R) Xeon(R) ..., 8x NVIDIA H200"."""
    names = [
        gpu.name or (f"GPU {gpu.device_id}" if gpu.device_id is not None else "GPU")
        for gpu in host.devices_of_kind(DeviceKind.GPU)
        if gpu.physical_function is None
    ]
    cpu = host.cpu.name or host.architecture or "unknown processor"
    parts = [f"{len(host.packages) or 1}x {cpu}"]
    parts += [f"{names.count(name)}x {name}" for name in dict.fromkeys(names)]
    return ", ".join(parts)
