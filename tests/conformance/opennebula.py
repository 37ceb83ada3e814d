"""OpenNebula's own parser reads the template, and its own checks take the topology and devices."""

import os
import re
import subprocess
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path

from lxml import etree

from homenode.units import KIB, MIB
from tests.conformance.builds import PROGRAMS, absent, folder
from tests.conformance.judge import Answer, Example, Facts, Judge
from tests.conformance.vms import Planned, bdfs_of, planned_cases

EXAMPLE = Example(
    file=b"""# GPU box; see wiki
Name = "gpu101" # of the lab
CPU  = 2.5
vcpu = 8
MEMORY = "32768"
DISK = [ IMAGE_ID = 7, # golden
  DEV_PREFIX = "vd" ]
NIC=[NETWORK="private",MODEL="virtio"]
OS = [ ARCH = "x86_64", MACHINE = "q35", FIRMWARE = "UEFI" ]
TOPOLOGY = [
  PIN_POLICY = NONE, SOCKETS = 1, CORES = 8, THREADS = 1, MEMORY_ACCESS = shared ]
PCI = [ SHORT_ADDRESS = "19:00.0", VM_BUS = "9" ]
SCHED_REQUIREMENTS = "ID=\\"4\\" | ID=\\"5\\""
LOGO=
""",
    owned=r"vcpu|MEMORY|NUMA_NODE|PCI|TOPOLOGY|  PIN_POLICY",
    free=r"#|NAME|OS|CPU = |CPU_MODEL",
    refused_for=("one host node",),
)

VARIABLE = "HOMENODE_OPENNEBULA"

_SOURCES = (
    *(f"src/parsers/{name}.cc" for name in ("template_parser", "template_syntax", "mem_collector")),
    "src/template/Template.cc",
    *(f"src/common/{name}.cc" for name in ("Attribute", "NebulaUtil", "SSLUtil")),
)
_TAKEN = {
    "src/vm/VirtualMachineParser.cc": (
        "int VirtualMachine::parse_topology",
        "int VirtualMachine::check_pci_attributes",
    ),
    "src/host/HostShare.cc": ("HostShare::PinPolicy HostShare::str_to_pin_policy",),
    "src/host/HostSharePCI.cc": ("int HostSharePCI::get_pci_value",),
}
"""Functions of files that need all of oned: they are taken out, and nothing else of them is."""


def _root() -> Path:
    return Path(os.environ.get(VARIABLE, ""))


def missing() -> str | None:
    if not os.environ.get(VARIABLE):
        return f"{VARIABLE} names no sources of OpenNebula"
    return absent("c++")


def version() -> str:
    text = (_root() / "include" / "NebulaService.h").read_text()
    return str(max(re.findall(r'return "([0-9]+\.[0-9]+\.[0-9]+)"', text)))


def _function(text: str, head: str) -> str:
    """From its first line to the brace that closes it, at the start of a line."""
    start = text.index(f"\n{head}")
    return text[start : text.index("\n}", start) + 3]


@cache
def _program() -> Path:
    taken = [
        _function((_root() / path).read_text(), head)
        for path, heads in _TAKEN.items()
        for head in heads
    ]
    (folder() / "taken.inc").write_text("using namespace std;\n" + "\n".join(taken))
    made = folder() / "opennebula"
    argv = ["c++", "-std=c++17", "-O0", "-w", f"-I{folder()}", "-I/usr/include/libxml2"]
    argv += [f"-I{_root() / part}" for part in ("include", "src/parsers")]
    sources = [PROGRAMS / "opennebula.cc", *(_root() / path for path in _SOURCES)]
    libraries = ["-lxml2", "-lssl", "-lcrypto", "-lz"]
    argv += ["-o", str(made), *map(str, sources), *libraries]
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return made


def _read(document: bytes) -> tuple[Facts, str | None]:
    path = folder() / "vm.tmpl"
    path.write_bytes(document)
    done = subprocess.run([_program(), path], capture_output=True, check=False, timeout=60)
    if done.returncode:
        return {}, done.stderr.decode("utf-8", "replace")
    root = etree.fromstring(done.stdout)

    def number(path: str) -> int:
        return int(root.findtext(path) or 0)

    nodes = [{part.tag: part.text or "" for part in node} for node in root.findall("NUMA_NODE")]
    return {
        "vCPUs": number("VCPU"),
        "memory": number("MEMORY") * MIB,
        "policy": root.findtext("TOPOLOGY/PIN_POLICY") or "NONE",
        "shape": tuple(number(f"TOPOLOGY/{one}") for one in ("SOCKETS", "CORES", "THREADS")),
        "pages": number("TOPOLOGY/HUGEPAGE_SIZE") * MIB,
        "nodes": [(int(node["TOTAL_CPUS"]), int(node["MEMORY"]) * KIB) for node in nodes],
        "distances": [node.get("DISTANCE", "") for node in nodes],
        "devices": sorted(one.findtext("SHORT_ADDRESS") or "" for one in root.findall("PCI")),
    }, None


def _planned(case: Planned) -> Facts:
    plan = case.plan
    whole = [(plan.vm.vcpus, plan.vm.memory_bytes)]
    cells = [(len(cell.vcpus), cell.memory_bytes) for cell in plan.cells]
    mirrored = len(cells) > 1 or plan.layout.cells == "mirrored"
    names = list(map(str, bdfs_of(plan)))
    domains = any(device.bdf.domain for device in case.host.pci_devices)
    facts: dict[str, object] = {
        "vCPUs": plan.vm.vcpus,
        "memory": plan.vm.memory_bytes,
        "devices": sorted(names if domains else [name[5:] for name in names]),
    }
    if plan.vm.cpu_topology is not None:
        sockets, dies, cores, threads = plan.vm.cpu_topology
        facts["shape"] = (sockets, dies * cores, threads)
    if plan.vm.page_bytes is not None:
        facts["pages"] = plan.vm.page_bytes
    if plan.vcpu_pins:
        lone = (
            "CORE"
            if plan.vm.cpu_topology is None or plan.vm.cpu_topology.threads == 1
            else "THREAD"
        )
        policies = {"one-pu-per-core": lone, "node": "SHARED", "all-pus": "THREAD"}
        facts["policy"] = policies[plan.layout.pinning]
        facts["nodes"] = cells if mirrored else whole
    if plan.vcpu_pins and mirrored:
        rows = [",".join(f"{i}:{n}" for i, n in enumerate(c.distances)) for c in plan.cells]
        facts["distances"] = rows
    return facts


def ask(names: Sequence[str]) -> Iterator[Answer]:
    for case in planned_cases(names, "opennebula", (EXAMPLE.file,)):
        read, refusal = _read(case.document)
        yield Answer(
            case=case.case, about=case.about, planned=_planned(case), read=read, refusal=refusal
        )


OPENNEBULA = Judge(
    name="opennebula",
    program="OpenNebula",
    reads="the template: its parser, checks of topology and of PCI devices; which nodes its "
    "scheduler takes is not asked",
    setup="c++, libxml2 and libssl with headers; sources of github.com/OpenNebula/one in a folder "
    "that HOMENODE_OPENNEBULA names",
    version=version,
    missing=missing,
    ask=ask,
    short=20,
)
