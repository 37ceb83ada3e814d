"""KubeVirt's converter and hook manager call the hook at each definition, and libvirt prints it."""

import os
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial
from pathlib import Path
from random import Random
from xml.etree import ElementTree

import pytest

from homenode.machine.discover.host import discover
from homenode.machine.topology import Host
from tests.conformance import libvirt
from tests.conformance.builds import absent, directory
from tests.conformance.judge import Answer, Judge
from tests.kubevirt.test_chain import VERSIONS, build_chain, definitions, sidecar
from tests.kubevirt_documents import IBM, IBM_GPUS, shipped


@cache
def _programs(version: str) -> Path | str:
    """virt-launcher's chain and the shim of that version; words where they cannot be built."""
    made = directory() / f"chain-{version}"
    made.mkdir()
    try:
        return build_chain(made, version)
    except pytest.skip.Exception as reason:
        return str(reason)


def _missing(version: str) -> Callable[[], str | None]:
    def missing() -> str | None:
        if os.geteuid() != 0:
            return "needs root"
        lacking = absent("go", "unshare") or libvirt.missing()
        found = lacking or _programs(version)
        return found if isinstance(found, str) else None

    return missing


def _pus(draw: Random, host: Host, nodes: set[int]) -> list[int]:
    """What a kubelet gives: whole cores of these nodes, and a CPU of the last for the emulator."""
    pus: list[int] = []
    for index in sorted(nodes):
        cores = [core.pus for core in host.cores if core.pus <= host.nodes[index].pus]
        start = draw.randrange(len(cores) // 2)
        for core in cores[start : start + draw.randint(1, 6)]:
            pus += map(int, core)
    spare = next(pu for pu in sorted(host.nodes[max(nodes)].pus, reverse=True) if pu not in pus)
    return sorted([*pus, int(spare)])


def _answer(programs: Path, name: str) -> Answer:
    draw = Random(f"kubevirt-chain {name}")
    host = discover(shipped(IBM))
    node_of = {str(d.bdf)[5:]: int(d.node or 0) for d in host.pci_devices}
    gpus = tuple(sorted(draw.sample(IBM_GPUS, draw.randint(1, len(IBM_GPUS)))))
    homes = {node_of[gpu] for gpu in gpus}
    others = set(draw.sample(range(len(host.nodes)), draw.randint(0, len(host.nodes))))
    pus = _pus(draw, host, homes | others)
    done = definitions(programs, pus, gpus, draw.choice((0, 1)))
    cells = sorted({int(pu.node or 0) for pu in host.pus if int(pu.index) in pus})
    assert host.distances is not None
    rows = [[str(host.distances[a][b]) for b in cells] for a in cells]
    planned: dict[str, object] = {}
    read: dict[str, object] = {}
    for number, one in enumerate(done, 1):
        facts = libvirt.read_document(one["Printed"])
        root = ElementTree.fromstring(one["Printed"])
        shown = {
            f"devices of definition {number}": facts["devices"],
            f"distances of definition {number}": [
                [sibling.get("value") for sibling in cell.iterfind("distances/sibling")]
                for cell in root.iterfind("cpu/numa/cell")
            ],
            f"addresses of definition {number}": facts["addresses"],
        }
        read |= shown
        planned |= {
            f"devices of definition {number}": [
                (f"0000:{gpu}", cells.index(node_of[gpu])) for gpu in gpus
            ],
            f"distances of definition {number}": rows if len(cells) > 1 else [[]],
            f"addresses of definition {number}": read["addresses of definition 1"],
        }
    return Answer(case=name, about=f"{len(gpus)} GPUs, CPUs {pus}", planned=planned, read=read)


def _ask(version: str) -> Callable[[Sequence[str]], Iterator[Answer]]:
    def ask(names: Sequence[str]) -> Iterator[Answer]:
        programs = _programs(version)
        assert isinstance(programs, Path), programs
        work = Path(tempfile.mkdtemp(dir=directory()))
        with sidecar(programs, work, subprocess.DEVNULL):
            for name in names:
                yield _answer(programs, name)

    return ask


CHAINS = tuple(
    Judge(
        name=f"kubevirt-chain-{version.removeprefix('v')}",
        program="KubeVirt: converter, hook manager, sidecar shim",
        reads="VMIs with GPUs and the hook: the cells of the GPUs' expander buses, distances "
        "and addresses at each of virt-launcher's definitions, as libvirt prints them",
        setup="go, with the module kubevirt.io/kubevirt; libvirtd, as root",
        version=partial(version.removeprefix, "v"),
        missing=_missing(version),
        ask=_ask(version),
        marker="lab",
        short=3,
    )
    for version in VERSIONS
)
