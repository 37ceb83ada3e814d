"""DeviceOrder: which GPU each number of Slurm's is, as gres.conf orders a node's devices.

Slurm numbers devices by their place in its own list: IDX of a job, and SLURM_JOB_GPUS. Lines by
hand stand there as they are written, file by file; what AutoDetect finds is sorted by PCI address.
Seen: 22.05.8, File=.../gpu[7,5,6,4] before gpu[3,2] and gpu[0-1]. Source: gres.conf(5), AutoDetect.
"""

from dataclasses import dataclass

from homenode.errors import InputError
from homenode.slurm.config import Config
from homenode.slurm.gpu_lines import placed_files
from homenode.slurm.gres import GresLine, autodetect_for, gres_lines, lines_for


@dataclass(frozen=True, slots=True)
class DeviceOrder:
    """A cluster's gres.conf, for this question."""

    lines: tuple[GresLine, ...]

    def numbers(self, node: str) -> tuple[int, ...] | None:
        """The driver's number of the GPU at each place of a node's list.

        A MIG slice (MultipleFiles) is at its GPU's number. None where the lines give no order.
        """
        own = lines_for(self.lines, node)
        if not own or autodetect_for(self.lines, node) is not None:
            return None
        placed = placed_files(own)
        if any(file is None for _, file, _ in placed):
            return None
        return tuple(number for _, _, number in placed)

    def places(self, gpus: int) -> dict[int, int]:
        """Slurm's number of each GPU by the driver's, for nodes that all list them alike.

        gpus: how many a node has. Raises InputError where nodes differ, so that one list of numbers
        is not for all, and where the lines are about other GPUs or about MIG slices.
        """
        own: dict[str, list[GresLine]] = {}
        for line in self.lines:
            for node in (line.nodes or ("",)) if line.name == "gpu" else ():
                own.setdefault(node, []).append(line)
        orders = {
            self.numbers(node)
            for node in {tuple(map(id, lines)): node for node, lines in own.items()}.values()
        }
        if len(orders) > 1:
            raise InputError(
                "gres.conf: expected nodes that list their GPUs in one order, found "
                f"{len(orders)} orders",
                hint="give a copy with the lines of the nodes that the job runs on",
            )
        order = next(iter(orders), None)
        if order is None:  # AutoDetect: by address
            return {gpu: gpu for gpu in range(gpus)}
        if sorted(order) != list(range(gpus)):
            raise InputError(
                f"gres.conf: expected lines about GPUs 0-{gpus - 1}, each once, as the host has "
                f"them, found {','.join(map(str, sorted(order)))[:60]}",
                hint="`homenode slurm check` says more",
            )
        return {gpu: place for place, gpu in enumerate(order)}


def device_order(gres: Config) -> DeviceOrder:
    """The order that a gres.conf gives.

    Raises ParseError that names the line, InputError for a file that says nothing of GPUs.
    """
    lines = gres_lines(gres)
    if not any(line.name == "gpu" or line.autodetect is not None for line in lines):
        stated = "".join(
            f", and Include {other.path}, which is not read: {other.reason}"
            for other in gres.not_read[:1]
        )
        raise InputError(
            f"{gres.source}: expected lines with Name=gpu or AutoDetect=, found none{stated}"
        )
    return DeviceOrder(lines)
