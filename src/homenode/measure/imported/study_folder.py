"""Study folder: results/<gpu>/<config>/ as the study's scripts write it, as one run.

    metadata.json  cpu_single.txt  cpu_all.txt  stream.txt  stream_numa_local.txt  …_remote.txt
    mem_latency.txt  gpu_compute.txt  gpu_bandwidth.txt  nccl_allreduce.txt  numa_topology.txt

Source: run_vcpu_benchmark.sh of revision 8476fab. What follows from it and not from the files:

* "local" and "remote" are memory bound to node 0 and to node 1, with threads on all nodes.
* Collectives ran with P2P switched off, ring and simple; where no GPU had a node, on PUs and memory
  of node 0. A guest with cells and no expander buses is such a one.
* One sample of each CPU test; gpu_bandwidth.txt holds five runs under "# run N".
* summary.csv is derived from the others, and may be stale; hugepages.txt is the guest's own pool
  and not its backing. Neither is read.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from homenode.errors import ParseError
from homenode.gap import Gap
from homenode.measure.figures import nvidia as gpu_figures
from homenode.measure.figures import processors as cpu_figures
from homenode.measure.figures.sample import Figures, joined, sample
from homenode.measure.figures.tool_log import Tool, figures_of
from homenode.plan.layout import PRESETS, GuestCells
from homenode.results.model import UNKNOWN_SWITCHES, Condition, Switches
from homenode.tools import json_documents, numactl, stream, study_programs

FILES = frozenset(
    """
    metadata.json cpu_single.txt cpu_all.txt stream.txt stream_numa_local.txt
    stream_numa_remote.txt mem_latency.txt gpu_compute.txt gpu_bandwidth.txt
    nccl_allreduce.txt numa_topology.txt
""".split()
)
"""Names that are read."""

NOT_READ = frozenset({"summary.csv", "hugepages.txt", "cpu_topology.txt"})

LAYOUTS = {
    "vcpu-pin": "pin",
    "vcpu-pin-numa": "pin-numa",
    "vcpu-pin-numa-smt": "pin-numa-smt",
    **{name: name for name in PRESETS},
}
"""Presets of folder names: the study's and our own, in small letters, with dashes."""

_SUFFIX = re.compile(
    r"[-. ]?(?:\(\d{1,4}\)|(?<=[-. ])(?:\d{1,4}(?:-?(?:c|vcpus?|cores?))?|"
    r"(?:run|rep|boot)-?\d{1,4}))\Z",
    re.A,
)
"""What people add to a layout's name: a number of cores, a repeat, a copy's number."""

_RUN = re.compile(r"(?m)^# run \d+\s*$", re.ASCII)


def is_study_folder(names: frozenset[str]) -> bool:
    """Whether these files are a folder of the study's: its metadata, or two others of its names."""
    found = names & FILES
    return "metadata.json" in found or len(found) >= 2


def switches_of(name: str) -> Switches:
    """The layout that a folder's name stands for; unknown where it stands for none.

    >>> switches_of("vcpu_pin_60c").name, switches_of("VCPU-Pin_NUMA.run2 (1)").name
    ('pin', 'pin-numa')
    """
    name = name.lower().replace("_", "-")
    preset = LAYOUTS.get(name)
    while preset is None and (shorter := _SUFFIX.sub("", name)) != name:
        name, preset = shorter, LAYOUTS.get(shorter)
    return UNKNOWN_SWITCHES if preset is None else Switches.of(PRESETS[preset])


def figures_of_study(files: Mapping[str, str]) -> Figures:
    """All figures of a folder. files: text by name; unknown names are not looked at.

    What cannot be read is a gap that names its file: the others are kept.
    """
    read: dict[str, Callable[[str], Figures]] = {
        "metadata.json": _metadata,
        "cpu_single.txt": lambda text: figures_of(Tool.SYSBENCH, text, "cpu_single.txt"),
        "cpu_all.txt": lambda text: figures_of(Tool.SYSBENCH, text, "cpu_all.txt"),
        "stream.txt": lambda text: figures_of(Tool.STREAM, text, "stream.txt"),
        "stream_numa_local.txt": lambda text: cpu_figures.of_stream(stream.parse(text), 0),
        "stream_numa_remote.txt": lambda text: cpu_figures.of_stream(stream.parse(text), 1),
        "mem_latency.txt": lambda text: cpu_figures.of_chase(study_programs.parse_chase(text)),
        "gpu_compute.txt": _matmul,
        "gpu_bandwidth.txt": _copies,
        "nccl_allreduce.txt": _collective,
    }
    parts = []
    for name, reader in read.items():
        if name in files and files[name].strip():
            parts.append(_or_gap(reader, name, files[name]))
        elif name in files:
            parts.append(Figures(gaps=(Gap(name, "empty: the test did not run"),)))
    return joined(parts)


def vcpus_of(files: Mapping[str, str]) -> int | None:
    """vCPUs of the guest: of all its nodes, else as its metadata says."""
    hardware = _hardware(files)
    if hardware is not None:
        return sum(len(node.pus) for node in hardware.nodes) or None
    try:
        found = json_documents.whole(files.get("metadata.json", ""), "metadata.json").get("vcpus")
    except ParseError:
        return None
    return found if isinstance(found, int) and 0 < found < 1 << 20 else None


def contradictions(files: Mapping[str, str], switches: Switches) -> Iterator[str]:
    """Why the guest cannot have had the layout that its folder is named for."""
    hardware = _hardware(files)
    if hardware is None or switches.cells is None:
        return
    nodes = sum(bool(node.pus) for node in hardware.nodes)
    if switches.cells is GuestCells.FLAT and nodes > 1:
        yield f"layout {switches.name} has no guest cells, but the guest showed {nodes} nodes"
    if switches.cells is GuestCells.MIRRORED and nodes == 1:
        yield f"layout {switches.name} has guest cells, but the guest showed one node"


def _hardware(files: Mapping[str, str]) -> "numactl.NumactlHardware | None":
    try:
        return numactl.parse_hardware(files["numa_topology.txt"])
    except (KeyError, ParseError):
        return None


def _or_gap(reader: Callable[[str], Figures], name: str, text: str) -> Figures:
    try:
        found = reader(text)
    except ParseError as error:
        return Figures(gaps=(Gap(name, str(error).replace("\n  hint:", ";")),))
    return found


def _metadata(text: str) -> Figures:
    found = json_documents.whole(text, "metadata.json")
    devices: Any = found.get("gpu_devices")
    names = [name for name in devices if isinstance(name, str)] if isinstance(devices, list) else []
    return Figures(gpu_names=tuple(dict.fromkeys(name[:100] for name in names)))


def _matmul(text: str) -> Figures:
    found = sample("matmul-time", "ns", study_programs.parse_matmul(text), index=0)
    return Figures((found,), (Condition("tool matmul", "8192 x 8192, fp32, mean of 100"),))


def _copies(text: str) -> Figures:
    """Five runs, each a sample of its GPU. Which program made them is seen by its words."""
    runs = [run for run in _RUN.split(text) if run.strip()]
    if not runs:
        raise ParseError("gpu_bandwidth.txt", "runs under '# run 1'", "none")
    parts = []
    for run in runs:
        if "Host-to-Device:" in run:
            parts.append(gpu_figures.of_copies(study_programs.parse_copies(run)))
        elif "RocmBandwidthTest" in run or "Src Device Id" in run:
            parts.append(figures_of(Tool.ROCM, run, "gpu_bandwidth.txt"))
        else:
            parts.append(figures_of(Tool.CUDA, run, "gpu_bandwidth.txt"))
    return joined(parts)


def _collective(text: str) -> Figures:
    return joined(
        (
            figures_of(Tool.NCCL_TESTS, text, "nccl_allreduce.txt"),
            Figures(
                conditions=(
                    Condition("tool collective transport", "P2P off, ring, simple"),
                    Condition(
                        "tool collective binding", "GPUs' nodes; node 0 where they have none"
                    ),
                )
            ),
        )
    )
