"""GPUs shown: those of a machine's GPUs that its driver gives to us, as numbered by it.

/sys shows all GPUs. A job, a container or CUDA_VISIBLE_DEVICES may leave us fewer, in another
order; a tool that is asked to use all of them then fails, and its numbers are of others.
"""

from dataclasses import dataclass

from homenode.bdf import Bdf
from homenode.errors import ParseError
from homenode.gap import Gap
from homenode.measure.model import Group
from homenode.pci import PciDevice
from homenode.tools import json_documents

FORMAT = "homenode.gpus/1"
MAX_GPUS = 1024

_SOURCE = "GPUs shown"
_GROUPS = (Group.GPU_COPY, Group.MATMUL, Group.GPU_BANDWIDTH, Group.GPU_SMALL, Group.GPU_PEER,
           Group.NCCL)  # fmt: skip


@dataclass(frozen=True, slots=True)
class ShownGpus:
    """addresses: by the driver's number. reason: why there are none, in the driver's words."""

    addresses: tuple[Bdf, ...]
    reason: str | None = None


def parse(text: str) -> ShownGpus | None:
    """What measure/programs/gpus_shown printed; None where no driver could be asked.

    Slices of one GPU (MIG) have one address, and it counts once. Raises ParseError.
    """
    line = next((one for one in text.split("\n") if one.startswith('{"format"')), None)
    if line is None:
        raise ParseError(_SOURCE, f'a line with "format": "{FORMAT}"', text.strip()[:60] or "none")
    found = json_documents.whole(line, _SOURCE)
    addresses, reason = found.get("addresses"), found.get("reason")
    if found.get("format") != FORMAT or not isinstance(reason, str | None):
        raise ParseError(_SOURCE, FORMAT, line[:60])
    if addresses is None:
        return None
    if not isinstance(addresses, list) or len(addresses) > MAX_GPUS:
        raise ParseError(_SOURCE, f"a list of at most {MAX_GPUS} addresses", line[:60])
    known = [Bdf.parse(str(one), _SOURCE) for one in addresses]
    return ShownGpus(tuple(dict.fromkeys(known)), reason)


def shown_alone(
    gpus: tuple[PciDevice, ...], shown: ShownGpus, left_out: list[Gap]
) -> tuple[PciDevice, ...]:
    """Those that are shown, in the driver's order; the others go to left_out.

    All of them where the driver gives addresses that none of them has: it speaks of other ones.
    """
    by_address = {gpu.bdf: gpu for gpu in gpus}
    found = tuple(by_address[one] for one in shown.addresses if one in by_address)
    if shown.addresses and not found:
        reason = f"the driver shows {shown.addresses[0]}, which is none of this machine's"
        left_out.append(Gap(Group.GPU_BANDWIDTH, reason))
        return gpus
    hidden = [gpu for gpu in gpus if gpu not in found]
    if not found:
        reason = f"the driver shows no GPU to this process: {shown.reason or 'none is visible'}"
        left_out += [Gap(group, reason) for group in _GROUPS]
    elif hidden:
        others = f" and {len(hidden) - 1} more" if len(hidden) > 1 else ""
        reason = "not shown to this process (a job's or a container's devices, *_VISIBLE_DEVICES)"
        left_out.append(Gap(Group.GPU_BANDWIDTH, f"{hidden[0].bdf}{others}: {reason}"))
    return found
