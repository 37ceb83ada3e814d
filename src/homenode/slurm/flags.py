"""Flags: a binding in srun's and sbatch's own words.

Masks are of the kernel's PU numbers, lists of memory the kernel's nodes: task/affinity translates
the masks that it makes itself from abstract ids, and takes a user's as they are. So LUMI's
documentation binds MI250X (0xfe000000000000 is cores 49 to 55, of node 3). Older versions take
masks only in a job that has the whole node; newer ones refuse those that leave the job's CPUs.
Source: srun(1), --cpu-bind, --mem-bind, --gpu-bind, --gpus-per-task; Slurm's
src/plugins/task/affinity/dist_tasks.c, lllp_distribution.
"""

from collections.abc import Mapping, Sequence

from homenode.slurm.memory_bind import MemoryBind
from homenode.slurm.ranks import Binding


def srun_flags(
    binding: Binding, memory: MemoryBind, places: Mapping[int, int] | None = None
) -> tuple[str, ...]:
    """What srun needs, one option each. The job has its nodes to itself.

    places: Slurm's number of each GPU, as gres.conf lists them; None = by address as well.
    """
    ranks = binding.ranks
    # No --cpus-per-task: it implies --exact, and masks hold only in a step with every CPU.
    flags = [
        f"--ntasks-per-node={len(ranks)}",
        f"--cpu-bind=mask_cpu:{','.join(f'0x{rank.pus.bits:x}' for rank in ranks)}",
    ]
    if memory is not MemoryBind.NONE:
        flags.append(f"--mem-bind={_memory(binding, memory)}")
    each = len(ranks[0].gpus)
    if len(ranks) * each == binding.gpus_on_node:
        flags.append(f"--gpus-per-task={each}")
    else:
        flags.append(f"--gpus-per-node={binding.gpus_on_node}")
    shares = [[gpu.index for gpu in rank.gpus] for rank in ranks]
    if places is not None:
        shares = [[places[index] for index in share] for share in shares]
    flags.append(f"--gpu-bind={_gpus(shares)}")
    return tuple(flags)


def sbatch_lines(binding: Binding) -> tuple[str, ...]:
    """The head of a batch script that asks for what the flags need."""
    return (
        "#SBATCH --exclusive",
        f"#SBATCH --ntasks-per-node={len(binding.ranks)}",
        f"#SBATCH --gpus-per-node={binding.gpus_on_node}",
    )


def _memory(binding: Binding, memory: MemoryBind) -> str:
    several = any(len(rank.nodes) != 1 for rank in binding.ranks)
    if several:
        masks = (f"0x{sum(1 << node for node in rank.nodes):x}" for rank in binding.ranks)
        value = f"mask_mem:{','.join(masks)}"
    else:
        value = f"map_mem:{','.join(str(rank.nodes[0]) for rank in binding.ranks)}"
    return f"prefer,{value}" if memory is MemoryBind.PREFERRED else value


def _gpus(shares: Sequence[Sequence[int]]) -> str:
    if all(len(share) == 1 for share in shares):
        return f"map_gpu:{','.join(str(share[0]) for share in shares)}"
    masks = (f"0x{sum(1 << index for index in share):x}" for share in shares)
    return f"mask_gpu:{','.join(masks)}"
