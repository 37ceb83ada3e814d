"""Logs of two ranks on two nodes, in the words of each version's messages."""


def _line(rank: int, words: str) -> str:
    return f"gpu-vm:10{rank}:20{rank} [{rank}] NCCL INFO {words}\n"


def log_of(
    version: str,
    *,
    affinities: tuple[str, str] = ("", ""),
    nodes: tuple[str, str] = ("0", "1"),
    path: str = "SYS",
    transport: str = "SHM/direct/direct",
    order: str = "0   1",
    numa: tuple[int, int] | None = None,
) -> str:
    """What a job of two ranks prints. affinities: as that version writes them, "" = no line."""
    number = tuple(int(part) for part in version.split(".")[:2])
    long = number >= (2, 20)
    text = f"NCCL version {version}+cuda12.4\n"
    text += _line(0, "NCCL_DEBUG set by environment to INFO.")
    if number >= (2, 27):
        start = (
            "ncclCommInitRankConfig comm 0x55 rank {0} nranks 2 cudaDev {0} nvmlDev {0} busId {1}"
        )
    else:
        start = "comm 0x55 rank {0} nranks 2 cudaDev {0} nvmlDev {0} busId {1}"
    for rank, bus in ((0, "81000"), (1, "c1000")):
        text += _line(rank, start.format(rank, bus) + " commId 0xab - Init START")
    for rank in (0, 1):
        text += _line(rank, "=== System : maxBw 22.0 totalBw 48.0 ===")
        for number_of, bus, gpu in ((nodes[0], "81000", 0), (nodes[1], "c1000", 1)):
            system = "0-" if long else ""
            text += _line(rank, f"CPU/{system}{number_of} (1/1/3)")
            text += _line(rank, f"+ PCI[48.0] - GPU/{system}{bus} ({gpu})")
            text += _line(rank, "+ SYS[22.0] - CPU/" + system + "1")
        text += _line(rank, "==========================================")
        first, second = ("0-81000", "0-c1000") if long else ("81000", "C1000")
        far = f"(3/22.{'0' if long else '000000'}/{path})"
        own = f"(0/5000.{'0' if long else '000000'}/LOC)"
        text += _line(
            rank, f"GPU/{first} :GPU/{first} {own} GPU/{second} {far} CPU/0-0 (1/48.0/PHB) "
        )
        text += _line(rank, f"GPU/{second} :GPU/{first} {far} GPU/{second} {own} ")
    for rank, mask in enumerate(affinities):
        if number >= (2, 27):
            text += _line(
                rank,
                f"ncclTopoGetCpuAffinity: Affinity for GPU {rank} is {mask or 'empty, ignoring'}. "
                f"(GPU affinity = {mask} ; CPU affinity = 0-7).",
            )
        elif mask:
            text += _line(rank, f"Setting affinity for GPU {rank} to {mask}")
    text += _line(
        0,
        f"Pattern 4, crossNic 0, nChannels 2, bw 11.000000/11.000000, type {path}/PIX, "
        "sameChannels 1",
    )
    text += _line(0, " 0 : GPU/0 GPU/1")
    for channel in ("00", "01"):
        text += _line(0, f"Channel {channel}/02 :    {order}")
    text += _line(0, "Trees [0] 1/-1/-1->0->-1 [1] 1/-1/-1->0->-1")
    for rank in (0, 1):
        for channel in ("00", "01"):
            if number >= (2, 24) and numa is not None:
                text += _line(
                    rank,
                    f"CUMEM Host Alloc Size 10485760 pointer 0x7f{rank}{channel} handle "
                    f"0xa{channel} numa {numa[rank]} dev {rank} granularity 4096",
                )
                text += _line(rank, "CUMEM allocated shareable buffer 0x7f size 10485760")
            elif number >= (2, 22):
                text += _line(
                    rank,
                    f"MMAP allocated shareable host buffer /dev/shm/nccl-A{rank}{channel} "
                    "size 9637888 ptr 0x7f",
                )
            else:
                text += _line(
                    rank,
                    f"Allocated 9637892 bytes of shared memory in /dev/shm/nccl-B{rank}{channel}",
                )
            bracket = f"{rank}[{rank}] -> {1 - rank}[{1 - rank}]"
            if number < (2, 19):
                at = ("81000", "c1000")
                bracket = f"{rank}[{at[rank]}] -> {1 - rank}[{at[1 - rank]}]"
            text += _line(rank, f"Channel {channel} : {bracket} via {transport}")
        if number >= (2, 22):
            text += _line(rank, f"[Proxy Progress] Device {rank} CPU core {4 * rank + 3}")
    counts = "2 coll channels, 0 nvls channels, 2 p2p channels, 2 p2p channels per peer"
    if long:
        counts = counts.replace("0 nvls", "2 collnet channels, 0 nvls")
    return text + _line(0, counts) + _line(0, "comm 0x55 rank 0 nranks 2 - Init COMPLETE")
