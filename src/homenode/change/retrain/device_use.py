"""DeviceUse: which processes have the VFIO group or device file of a function open. [I/O]

QEMU opens /dev/vfio/GROUP (or, with iommufd, /dev/vfio/devices/vfioN) before a VM runs and keeps it
until the VM ends. This needs no libvirt, which must not be asked from a hook or before it starts.

Source: Documentation/driver-api/vfio.rst.
"""

from collections.abc import Iterable, Mapping
from pathlib import Path

from homenode.bdf import Bdf
from homenode.change.retrain.plan import Use
from homenode.input_files import read_kernel_file
from homenode.machine.pci import PciDevice
from homenode.wording import printable

_FIRST_PID_NAMESPACE = "pid:[4026531836]"
"""Source: PROC_PID_INIT_INO in include/linux/proc_ns.h."""


def device_uses(
    devices: Iterable[PciDevice], *, proc: str = "/proc", sys: str = "/sys"
) -> Mapping[Bdf, Use]:
    """Who has each function open.

    holders is None where some process could not be looked into, and for a function that VFIO has
    and whose files are not known.
    """
    holders = _open_vfio_files(proc)
    found: dict[Bdf, Use] = {}
    for device in devices:
        files = _files(device, sys)
        if holders is None or (device.driver == "vfio-pci" and not files):
            found[device.bdf] = Use(None)
        else:
            names = {name for file in files for name in holders.get(file, ())}
            found[device.bdf] = Use(tuple(sorted(names)))
    return found


def _files(device: PciDevice, sys: str) -> tuple[str, ...]:
    number = device.iommu_group
    group = [] if number is None else [f"/dev/vfio/{number}", f"/dev/vfio/noiommu-{number}"]
    folder = Path(sys) / "bus/pci/devices" / str(device.bdf) / "vfio-dev"
    try:
        names = sorted(entry.name for entry in folder.iterdir())
    except OSError:
        names = []
    return (*group, *(f"/dev/vfio/devices/{name}" for name in names))


def _open_vfio_files(proc: str) -> dict[str, set[str]] | None:
    """VFIO file -> processes that have it open; None where some process is out of sight.

    In a container the host's QEMUs are: only the first PID namespace sees them all.
    """
    try:
        if str(Path(proc, "self/ns/pid").readlink()) != _FIRST_PID_NAMESPACE:
            return None
    except OSError:
        return None
    holders: dict[str, set[str]] = {}
    for process in Path(proc).iterdir():
        if not process.name.isdecimal():
            continue
        try:
            descriptors = tuple((process / "fd").iterdir())
        except PermissionError:
            return None
        except OSError:  # it ended meanwhile
            continue
        for descriptor in descriptors:
            try:
                target = str(descriptor.readlink())
            except PermissionError:
                return None
            except OSError:
                continue
            if target.startswith("/dev/vfio/") and target != "/dev/vfio/vfio":
                holders.setdefault(target, set()).add(f"{_name(process)} (process {process.name})")
    return holders


def _name(process: Path) -> str:
    content = read_kernel_file(str(process / "comm"))
    return printable((content or b"").decode("utf-8", "replace").strip()) or "?"
