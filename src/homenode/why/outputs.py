"""Outputs: what outputs of tools show that are no host's, no VM's and no log's."""

import re
from collections.abc import Iterator
from statistics import median

from homenode.bdf import Bdf
from homenode.catalogue import finding
from homenode.errors import HomenodeError
from homenode.findings import Finding, Severity
from homenode.machine.discover.lspci import host_from_lspci
from homenode.machine.pci import DeviceKind
from homenode.machine.tools.nccl_tests import parse as parse_nccl_tests
from homenode.machine.tools.nvidia_smi import parse_topology
from homenode.wording import first_few, plural

Matrix = list[list[float]]

_NEAR = ("PIX", "PXB", "PHB", "NODE", "SYS")
"""The words of nvidia-smi topo -m, the nearest first."""
_SWITCHED = 4
"""GPUs of boards of which none has all of them on root ports."""
_MANY_LINES = 400
_MOST_NAMED = 4
_PCIE_GB_PER_S = 60
"""More than a ring over PCIe 5.0 x16 reaches between GPUs."""
_NVLINKED = re.compile(r"SXM|HBM3|(?<!G)H200(?! NVL)|B[23]00|H800|H20\b")


_GROUP = re.compile(r"\s*IOMMU [Gg]roup (\d{1,5}):?\s*")
_FUNCTION = re.compile(
    r"\s*(?:[-*]\s)?((?:[0-9a-f]{4}:)?[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]) ([A-Z][A-Za-z0-9 /-]{2,60})"
)
_RANK = re.compile(r"#\s{1,8}Rank\s{1,8}(\d{1,6})\s.{0,60}? on\s{1,60}(\S{1,64}) device")
_P2P_ROW = re.compile(
    r"\s{1,8}\d{1,3}\s{1,12}(\d{1,6}(?:\.\d{1,3})?(?:\s{1,12}[\d.]{1,10}){0,63})\s*"
)
_P2P_SLOWER = 0.75
"""Of the rate through host memory: less says that direct transfers take a worse way."""
_FALLEN = 1 / 3
_RESOURCE = re.compile(r"^\s{1,16}([\w.-]{1,80}/[\w.-]{1,80}):\s{1,60}(\d{1,9})$", re.MULTILINE)
_BRIDGES = ("bridge", "Signal processing", "System peripheral", "Non-Essential")
_GPUS = ("VGA compatible", "3D controller", "Display controller")


def p2p_findings(text: str, where: str) -> Iterator[Finding]:
    """Of p2pBandwidthLatencyTest: GPUs without direct transfers, or that are slower with them."""
    found: dict[str, Matrix] = {"Connectivity": [], "=Disabled": [], "=Enabled": []}
    rows: Matrix = []
    for line in text.split("\n"):
        if "Matrix" in line:
            key = next((key for key in found if key in line and not found[key]), None)
            rows = found[key] if key else []
        elif match := _P2P_ROW.fullmatch(line):
            rows.append([float(word) for word in match[1].split()])
    connected, without, direct = found.values()
    if any(len(row) != len(rows) for rows in found.values() for row in rows):
        return
    none = [f"{a}-{b}" for a, row in enumerate(connected) for b in range(a) if not row[b]]
    if none:
        yield finding(
            "nccl-p2p-off",
            f"{plural(len(none), 'pair')} of GPUs",
            expected="P2P Connectivity 1",
            observed=f"0 of {first_few(none, _MOST_NAMED)}",
            source=where,
        )
    slower = [
        f"{a} to {b} {rate:g} instead of {off[b]:g}"
        for a, (on, off) in enumerate(zip(direct, without, strict=False))
        for b, rate in enumerate(on)
        if a != b < len(off) and rate < _P2P_SLOWER * off[b]
    ]
    if slower:
        yield finding(
            "p2p-slower",
            f"{plural(len(slower), 'way')} between GPUs",
            expected="direct transfers at least as fast as those through host memory",
            observed=f"GB/s: {first_few(slower, _MOST_NAMED)}",
            source=where,
        )


def copy_findings(text: str, where: str) -> Iterator[Finding]:
    """Of nvbandwidth between host and GPUs: a GPU that is slower than the others."""
    for line in text.split("\n"):
        match = _P2P_ROW.fullmatch(line)
        rates = [float(word) for word in match[1].split()] if match and "." in line else []
        usual = median(rates) if len(rates) > 1 else 0
        for gpu, rate in enumerate(rates):
            if rate < _P2P_SLOWER * usual:
                yield finding(
                    "gpu-link-differs",
                    f"GPU {gpu}",
                    expected=f"{usual:g} GB/s, as other GPUs have",
                    observed=f"{rate:g} GB/s",
                    source=where,
                )


def group_findings(text: str, where: str) -> Iterator[Finding]:
    """Of a listing of IOMMU groups, with a line for each function, or below one for each group:
    GPUs that share a group with a device of another card."""
    functions: list[tuple[int, Bdf, str]] = []
    group: int | None = None
    for line in text.split("\n"):
        rest = line
        if (head := _GROUP.match(line)) is not None:
            group, rest = int(head[1]), line[head.end() :]
        if group is not None and (own := _FUNCTION.match(rest)) is not None:
            functions.append((group, Bdf.parse(own[1]), own[2].strip()))
    for group, gpu, what in functions:
        if not what.startswith(_GPUS):
            continue
        others = [
            f"{bdf} {name}"
            for number, bdf, name in functions
            if number == group
            and (bdf.domain, bdf.bus, bdf.device) != (gpu.domain, gpu.bus, gpu.device)
            and not any(word in name for word in _BRIDGES)
        ]
        if others:
            yield finding(
                "iommu-group-shared",
                f"GPU {gpu} in group {group}",
                expected="functions of its own card, and bridges",
                observed=first_few(others, _MOST_NAMED),
                source=where,
                case="from a message",
            )


def matrix_findings(text: str, source: str) -> Iterator[Finding]:
    """Of nvidia-smi topo -m: NICs of another socket, no switch above many GPUs, a lost NVLink."""
    matrix = parse_topology(text)
    places = range(len(matrix.devices))
    gpus = [at for at in places if matrix.devices[at].name.startswith("GPU")]
    nics = [at for at in places if at not in gpus]
    best = {
        gpu: min(_NEAR.index(way) for nic in nics if (way := matrix.links[gpu][nic]) in _NEAR)
        for gpu in gpus
        if any(matrix.links[gpu][nic] in _NEAR for nic in nics)
    }
    far = [matrix.devices[gpu].name for gpu, near in best.items() if _NEAR[near] == "SYS"]
    if far and len(far) < len(gpus):
        yield finding(
            "nccl-nic-far",
            ", ".join(far),
            expected="a NIC at PIX, PXB, PHB or NODE",
            observed="SYS to each NIC, where other GPUs have one nearer",
            source=source,
        )
    lone = [matrix.devices[gpu].name for gpu in gpus if matrix.devices[gpu].cpus is None]
    if lone and len(lone) < len(gpus) and all(matrix.devices[gpu].nodes for gpu in gpus):
        yield finding(
            "job-gpu-far",
            ", ".join(lone),
            expected="CPUs of each GPU's node among those of the job that ran nvidia-smi",
            observed="no CPU affinity, where other GPUs have one",
            source=source,
        )
    ways = {matrix.links[a][b] for a in gpus for b in (*gpus, *nics) if a != b}
    plain = {way for way in ways if way in _NEAR}
    if len(gpus) >= _SWITCHED and nics and plain == {"PHB"}:
        yield finding(
            "topology-flat",
            f"{len(gpus)} GPUs and {len(nics)} NICs",
            expected="PIX or PXB between a GPU and its NIC, NODE or SYS to the others",
            observed="PHB for every pair",
            source=source,
        )
    linked = [gpu for gpu in gpus if any(matrix.nvlinks(gpu, b) for b in gpus if b != gpu)]
    alone = [gpu for gpu in gpus if gpu not in linked]
    whole = all(matrix.nvlinks(a, b) for a in linked for b in linked if a != b)
    if alone and whole and len(linked) > len(alone) and len(linked) > 1:
        yield finding(
            "gpu-nvlink-errors",
            first_few((matrix.devices[gpu].name for gpu in alone), _MOST_NAMED),
            expected="NVLinks, as the other GPUs have to each other",
            observed="none",
            source=source,
        )


def run_findings(text: str, where: str) -> Iterator[Finding]:
    """Of nccl-tests: wrong results, runs without partners, and NVLink that is not used."""
    ranks = [match.groups() for line in text.split("\n") if (match := _RANK.match(line))]
    copies = sum(int(rank) == 0 for rank, _ in ranks)
    hosts = {host for _, host in ranks}
    if copies > 1:
        yield finding(
            "nccl-tests-alone",
            f"{copies} runs",
            expected="one run with all ranks",
            observed="a rank 0 in each",
            source=where,
        )
        return
    run = parse_nccl_tests(text)
    rates = [half.bus_bytes_per_s / 1e9 for row in run.rows for half in row.halves()[:1]]
    if len(hosts) > 1 and rates and rates[-1] < _FALLEN * max(rates):
        yield finding(
            "nccl-falls-with-size",
            f"the last of {len(rates)} sizes between {len(hosts)} hosts",
            expected=f"{max(rates):.3g} GB/s, as at smaller ones",
            observed=f"{rates[-1]:.3g} GB/s",
            source=where,
        )
    if run.is_correct is False:
        yield finding(
            "nccl-wrong-values",
            run.collective or "nccl-tests",
            expected="Out of bounds values : 0 OK",
            observed="values that are wrong",
            source=where,
        )
    peak = run.peak_bus_bytes_per_s() / 1e9 if any(row.halves() for row in run.rows) else None
    is_linked = run.gpu_names and all(_NVLINKED.search(name) for name in run.gpu_names)
    is_large = max((row.size_bytes for row in run.rows), default=0) >= 1 << 26
    is_ring = len(hosts) == 1 and (run.gpus or 0) > 1 and run.collective in (None, "all_reduce")
    if peak is not None and peak < _PCIE_GB_PER_S and is_large and is_ring and is_linked:
        yield finding(
            "nvlink-not-used",
            first_few(dict.fromkeys(run.gpu_names), _MOST_NAMED),
            expected=f"more than {_PCIE_GB_PER_S} GB/s over NVLink",
            observed=f"{peak:.0f} GB/s between {run.gpus} GPUs of one host",
            source=where,
        )


def resource_findings(text: str, where: str) -> Iterator[Finding]:
    """Of Allocatable in kubectl describe node: devices of which the node has none to give, where it
    has no others of their maker."""
    found = dict(_RESOURCE.findall(text))
    makers = {name.partition("/")[0] for name, count in found.items() if count != "0"}
    if none := [name for name in found if name.partition("/")[0] not in makers]:
        yield finding("node-offers-none", ", ".join(none), "more than 0", "0", where)


def lone_gpu_findings(text: str, where: str) -> Iterator[Finding]:
    """Of a listing of a GPU without the port above it: fewer lanes may be the slot's own."""
    if text.count("\n") > _MANY_LINES:
        return
    try:
        host = host_from_lspci(text, where)
    except HomenodeError:
        return
    for gpu in host.devices_of_kind(DeviceKind.GPU):
        link = gpu.link
        if gpu.parent is not None or gpu.bdf.bus == 0 or link is None:
            continue
        width, most = link.current_width, link.max_width
        subject, expected = f"GPU {gpu.bdf}", "the link as its port has it"
        observed = f"x{width} of the GPU's x{most}; the port above it is not in the listing"
        if width is None or most is None or not 0 < width < most:
            yield finding("pcie-link-unknown", subject, expected, observed, where)
        else:
            yield finding(
                "pcie-link-narrow",
                subject,
                expected,
                observed,
                where,
                severity=Severity.WARNING,
                cost=None,
            )


_VIRTUAL_SWITCH = re.compile(
    r"^\S{1,20} PCI bridge.{0,40}XIO3130 .{0,80}$(?:\n[ \t].{0,300}$){0,60}?"
    r"\n[ \t]{1,40}LnkSta:.{0,20}2\.5GT/s.{0,20}Width x1\b",
    re.MULTILINE,
)


def virtual_switch_findings(text: str, where: str, *, is_guest: bool) -> Iterator[Finding]:
    """Ports of QEMU's switch in a listing of a guest, or of a few devices, by what they claim of
    their links."""
    found = _VIRTUAL_SWITCH.search(text)
    if found is not None and (is_guest or text.count("\n") < _MANY_LINES):
        yield finding(
            "nccl-virtual-switch",
            found[0].partition(" ")[0],
            expected="links as fast as the host's, or a topology file for NCCL",
            observed="2.5 GT/s x1",
            source=where,
        )
