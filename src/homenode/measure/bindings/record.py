"""Study record: what a job of a study wrote down of what it got, before it measured.

Texts of one attempt's folder, as jobs/measure.sh writes them; see there for the commands. Any of
them may be missing: then a gap says so.
"""

import re
from calendar import timegm
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import takewhile

from homenode.bdf import Bdf
from homenode.cpuset import CpuSet
from homenode.errors import ParseError
from homenode.gap import Gap
from homenode.indices import NodeIndex
from homenode.slurm.job import Job
from homenode.slurm.scontrol_job import parse_scontrol_jobs
from homenode.tools.numactl import (
    NumactlHardware,
    NumactlShow,
    parse_hardware,
    parse_show,
)

REPLAYED = re.compile(r"(?m)^replayed: (.{0,200})$")
"""What a stand-in for a measuring tool says of itself."""

FILES = (
    "node", "started", "ended", "job.txt", "others.txt", "allowed.txt", "numactl-show.txt",
    "numactl-hardware.txt", "gpu-places.txt", "nic-places.txt", "gpu-list.txt", "met",
    "nvbandwidth.txt", "times.txt", "power.csv", "app.txt", "bench.txt",
)  # fmt: skip
_ALLOWED = re.compile(r"(Cpus|Mems)_allowed_list:\s*(\S*)", re.ASCII)
_PLACE = re.compile(r"(\S{1,64}) (\S{1,20}) (-?\d{1,5}) (/\S{1,1000})", re.ASCII)
_TIME = re.compile(
    r"\b(Submit|Eligible|Start)Time=(\d{4})-(\d\d)-(\d\d)T(\d\d):(\d\d):(\d\d)", re.ASCII
)
_PROGRESS = re.compile(r"\d+ of \d+ steps done: |wrote results/", re.ASCII)
"""What homenode bench says on standard error where nothing is wrong."""
_MIG = re.compile(r"\sMIG (\S{1,40})\s+Device\s+\d+:", re.ASCII)
_GPU = re.compile(r"GPU \d+: (.{1,100})")


@dataclass(frozen=True, slots=True)
class DevicePlace:
    """A GPU or NIC as the kernel places it. node: None where it says -1. path: its bridges and
    itself, from the root complex down.
    """

    name: str
    bdf: Bdf
    node: NodeIndex | None
    path: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class JobRecord:
    """One attempt. None and () where it wrote nothing down.

    pus, mems: what the kernel allowed it. show: how what it measured was bound. others: jobs of
    others on the node. queue_wait_s: from when it could have started. gpus: how many it had.
    gpu_hours: used. met: jobs that measured with it, of how many. slices: MIG types of its GPUs.
    replayed: what a stand-in says of itself; None where real tools ran. started_s, ended_s: by the
    node's clock, seconds since 1970.
    """

    node: str
    job: Job | None
    pus: CpuSet | None
    mems: CpuSet | None
    show: NumactlShow | None
    hardware: NumactlHardware | None
    gpus: tuple[DevicePlace, ...]
    nics: tuple[DevicePlace, ...]
    slices: tuple[str, ...]
    gpu_count: int | None
    others: int | None
    queue_wait_s: float | None
    gpu_hours: float | None
    met: str | None
    replayed: str | None
    gaps: tuple[Gap, ...]
    started_s: float | None = None
    ended_s: float | None = None


def parse_record(texts: Mapping[str, str], node: str, gpus: int) -> JobRecord:
    """The record of these files. node, gpus: as the study asked for, where no file says it.

    texts: by name; NAME.err beside NAME is what went wrong.
    """
    gaps: list[Gap] = list(_errors(texts))
    job = _job(texts.get("job.txt", ""), gaps)
    allowed = dict(_allowed(texts.get("allowed.txt", ""), gaps))
    count = gpus if job is None else sum(share.gpus.count or 0 for share in job.shares) or gpus
    replayed = REPLAYED.search(texts.get("nvbandwidth.txt", ""))
    return JobRecord(
        texts.get("node", node).strip()[:100] or node,
        job,
        allowed.get("Cpus"),
        allowed.get("Mems"),
        _show(texts.get("numactl-show.txt", ""), gaps),
        _hardware(texts.get("numactl-hardware.txt", ""), gaps),
        tuple(_places(texts.get("gpu-places.txt", ""))),
        tuple(_places(texts.get("nic-places.txt", ""))),
        tuple(_MIG.findall(texts.get("gpu-list.txt", ""))),
        count,
        _others(texts.get("others.txt"), job),
        _wait(texts.get("job.txt", "")),
        hours_of(texts, count),
        texts.get("met", "").strip()[:40] or None,
        replayed[1].strip() if replayed else None,
        tuple(gaps),
        _seconds(texts.get("started", "")),
        _seconds(texts.get("ended", "")),
    )


def _seconds(text: str) -> float | None:
    word = text.strip()
    return float(word) if word.isascii() and word.isdigit() and len(word) < 12 else None


def _errors(texts: Mapping[str, str]) -> Iterator[Gap]:
    """What programs said on standard error: the first lines, and the last, which tells the end."""
    for name, text in sorted(texts.items()):
        if not name.endswith(".err"):
            continue
        lines = [line.strip() for line in text.splitlines() if line.strip()]
        if len(lines) > 1 and lines[0].endswith("is not on the PATH"):
            lines = lines[:1]
        lines = [line for line in lines if not _PROGRESS.match(line)]
        if lines:
            shown = lines if len(lines) <= 3 else [*lines[:2], lines[-1]]
            yield Gap(name.removesuffix(".err"), "; ".join(line[:200] for line in shown))


def _allowed(text: str, gaps: list[Gap]) -> Iterator[tuple[str, CpuSet]]:
    for found in _ALLOWED.finditer(text):
        try:
            yield found[1], CpuSet.parse(found[2], "allowed.txt")
        except ParseError as error:
            gaps.append(Gap("allowed.txt", error.message))


def _job(text: str, gaps: list[Gap]) -> Job | None:
    if not text.strip():
        return None
    try:
        jobs = parse_scontrol_jobs(text, "job.txt")
    except ParseError as error:
        gaps.append(Gap("job.txt", error.message))
        return None
    return jobs[0] if jobs else None


def _show(text: str, gaps: list[Gap]) -> NumactlShow | None:
    if not text.strip():
        return None
    try:
        return parse_show(text)
    except ParseError as error:
        gaps.append(Gap("numactl --show", error.message))
        return None


def _hardware(text: str, gaps: list[Gap]) -> NumactlHardware | None:
    if not text.strip():
        return None
    try:
        return parse_hardware(text)
    except ParseError as error:
        gaps.append(Gap("numactl --hardware", error.message))
        return None


def _places(text: str) -> Iterator[DevicePlace]:
    for line in text.splitlines()[:1024]:
        found = _PLACE.fullmatch(line.strip())
        if found is None:
            continue
        try:
            bdf = Bdf.parse(found[2], "places")
        except ParseError:
            continue  # a virtual device has no address
        parts = found[4].split("/")
        start = next((n for n, part in enumerate(parts) if part.startswith("pci")), len(parts))
        node = int(found[3])
        yield DevicePlace(
            found[1], bdf, NodeIndex(node) if node >= 0 else None, tuple(parts[start:])
        )


def _others(text: str | None, job: Job | None) -> int | None:
    if text is None or job is None:
        return None
    running = {line.partition("|")[0] for line in text.splitlines() if line.strip()}
    return len(running - {job.number})


def _wait(text: str) -> float | None:
    """Seconds between the moment when it could have started and its start."""
    # scontrol prints the time zone of its caller, which the script has set to UTC.
    times = {name: timegm((*map(int, when), 0, 0, 0)[:9]) for name, *when in _TIME.findall(text)}
    begin = times.get("Eligible", times.get("Submit"))
    start = times.get("Start")
    return None if begin is None or start is None else float(max(0, start - begin))


def hours_of(texts: Mapping[str, str], gpus: int) -> float | None:
    """GPU-hours from a job's own `started` and `ended`."""
    try:
        seconds = int(texts["ended"]) - int(texts["started"])
    except (KeyError, ValueError):
        return None
    return gpus * seconds / 3600 if 0 <= seconds < 1 << 31 else None


def nearness(gpu: DevicePlace, nic: DevicePlace) -> str:
    """Where the paths of a GPU and a NIC part.

    >>> bdf, node = Bdf.parse("1a:00.0"), NodeIndex(0)
    >>> gpu = DevicePlace("gpu", bdf, node, ("pci0000:17", "0000:17:01.0", "0000:18:00.0", "a"))
    >>> nic = DevicePlace("mlx5_0", bdf, node, ("pci0000:17", "0000:17:01.0", "0000:18:00.0", "b"))
    >>> nearness(gpu, nic)
    'same switch'
    """
    steps = zip(gpu.path, nic.path, strict=False)
    shared = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], steps))
    if shared >= 2:
        return "same switch"
    if shared == 1:
        return "same root complex"
    if gpu.node is None or nic.node is None:
        return "unknown"
    return "same node" if gpu.node == nic.node else "another node"
