"""The requests of each kind, in a fixed order, and how each is answered in this process."""

import json
import random
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import homenode as package
from homenode.machine.description.parse import list_shipped_hosts
from tests.command_line import Result, homenode
from tests.domain_corpus import NAMES, sample
from tests.frozen import drawn, drawn_options, projection


class Request(NamedTuple):
    key: str
    answer: Callable[[], str]


LAYOUTS = ("default", "pin", "pin-bound", "pin-numa", "pin-numa-smt", "pin-numa-pci")
GPU_COUNTS = (0, 1, 2, 3, 4, 6, 8)
SIZES = ((4, "8GiB"), (24, "64GiB"))


def _plan(*words: str | Path) -> str:
    result = homenode("plan", *words, "--json", whole=True)
    if not result.stdout.startswith("{"):
        return _error_text(result)
    document = json.loads(result.stdout)
    if "rejections" in document and "vm" not in document:
        return projection.refusal_text(document)
    proved = {True: "", False: "not proved; ", None: "not known; "}
    return proved[document.get("optimal", True)] + projection.plan_text(document)


def _error_text(result: Result) -> str:
    assert result.exception is None, result.exception
    return f"exit {result.exit_code}"


def _gpu_words(count: int, *, with_nics: bool = False) -> tuple[str, ...]:
    return (("--gpus", str(count)) if count else ()) + (("--with-nics",) if with_nics else ())


def shipped() -> Iterator[Request]:
    """Each shipped host: three layouts, seven numbers of GPUs, two sizes."""
    layouts = ("pin-bound", "pin-numa-smt", "pin-numa-pci")
    for host, layout, gpus, size in product(list_shipped_hosts(), layouts, GPU_COUNTS, SIZES):
        words = ("--host", host, "--layout", layout, "--vcpus", str(size[0]), "--memory", size[1])
        key = f"{host} {layout} {gpus} {size[0]}x{size[1]}"
        yield Request(key, partial(_plan, *words, *_gpu_words(gpus)))


_SMALL = """<domain type='kvm'>
  <name>vm</name>
  <memory unit='GiB'>{gib}</memory>
  <vcpu>{vcpus}</vcpu>
  <os firmware='efi'><type arch='{arch}' machine='{machine}'>hvm</type></os>
  <features><acpi/></features>
  <cpu mode='host-passthrough'/>
  {private}
  <devices><emulator>/usr/bin/qemu-system-{arch}</emulator></devices>
</domain>
"""
_PRIVATE = "<launchSecurity type='sev-snp'><policy>0x30000</policy></launchSecurity>"


def _in_file(content: str | bytes, name: str, use: Callable[[Path], str]) -> str:
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / name
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        return use(path)


def _auto(host: str, objective: str, gpus: int, nics: bool, buses: bool, private: bool) -> str:
    is_arm = 'architecture = "aarch64"' in _host_file(host)
    machine = ("virt" if buses else "sbsa-ref") if is_arm else ("q35" if buses else "pc")
    document = _SMALL.format(
        gib=4,
        vcpus=4,
        arch="aarch64" if is_arm else "x86_64",
        machine=machine,
        private=_PRIVATE if private else "",
    )
    words = ("--host", host, "--layout", "auto", "--objective", objective)
    return _in_file(
        document, "vm.xml", lambda vm: _plan(vm, *words, *_gpu_words(gpus, with_nics=nics))
    )


def _host_file(host: str) -> str:
    return (Path(package.__file__).parent / f"machine/hosts/{host}.toml").read_text()


def auto() -> Iterator[Request]:
    """Each shipped host: six objectives, devices, expander buses, private memory."""
    objectives = "memory-bandwidth multi-gpu gpu-copy latency throughput density".split()
    devices = ((0, False, "none"), (1, False, "gpu"), (1, True, "gpu+nic"))
    for host, objective, (gpus, nics, words), buses, private in product(
        list_shipped_hosts(), objectives, devices, (True, False), (False, True)
    ):
        key = f"{host} {objective} {words}{'' if buses else ' no-expander'}"
        key += " private" if private else ""
        yield Request(key, partial(_auto, host, objective, gpus, nics, buses, private))


def _made_host(rng: random.Random, number: int) -> str:
    """A host.toml of 9 to 64 nodes; some of its nodes have GPUs and NICs, some VMs are there."""
    packages = rng.choice((1, 2, 2, 4, 8))
    per_package = rng.randint(-(-9 // packages), 64 // packages)
    nodes = packages * per_package
    cores = rng.randint(1, 6)
    threads = rng.choice((1, 2))
    near = rng.choice((11, 12, 15))
    lines = [
        f'name = "made-{number}"',
        f"packages = {packages}",
        f"nodes_per_package = {per_package}",
        f"cores_per_package = {cores * per_package}",
        f"threads_per_core = {threads}",
        f"llcs_per_package = {per_package * (1 if cores % 2 else rng.choice((1, 2)))}",
        f'memory_per_node = "{rng.choice((8, 16, 32))}GiB"',
        f"distances = {{ same_package = {near}, other_package = {near + rng.choice((9, 20))} }}",
    ]
    ports = rng.choice(
        (
            '["gpu"]',
            '["gpu", "nic"]',
            '[{ switch = ["gpu", "nic"] }]',
            '[{ switch = ["gpu", "gpu", "nic"] }]',
        )
    )
    homes = rng.sample(range(nodes), rng.randint(1, min(nodes, 16)))
    homes_text = "[" + ", ".join(map(str, homes)) + "]"
    lines += ["[[root]]", f"node = {homes_text}", f"ports = {ports}"]
    taken = sorted(rng.sample(range(nodes * cores), rng.randint(0, nodes * cores // 2)))
    if taken and rng.random() < 0.6:
        node = taken[0] // cores
        pins = ",".join(map(str, taken))
        lines += ["[[vm]]", 'name = "there"', f'pins = "{pins}"', f'memory = {{ {node} = "2GiB" }}']
    return "\n".join(lines) + "\n"


def _made(number: int) -> str:
    rng = random.Random(number)
    description = _made_host(rng, number)
    vcpus = rng.choice((2, 3, 4, 6, 8, 12, 16, 24))
    words = ["--layout", rng.choice(LAYOUTS), "--vcpus", str(vcpus)]
    words += ["--memory", f"{rng.choice((2, 4, 8, 16, 48))}GiB"]
    gpus = rng.choice((0, 1, 1, 2, 2, 3, 4, 8))
    words += _gpu_words(gpus, with_nics=gpus > 0 and rng.random() < 0.3)
    if rng.random() < 0.2:
        words += ["--policy", rng.choice(("spread", "any"))]
    if rng.random() < 0.2:
        words += ["--max-nodes", str(rng.randint(1, 4))]
    return _in_file(description, "host.toml", lambda host: _plan(*words, "--host", host))


def made() -> Iterator[Request]:
    """Made hosts of 9 to 64 nodes, and whether the search proves its answer."""
    for number in range(300):
        yield Request(f"made-{number}", partial(_made, number))


_CORPUS_HOST = """name = "corpus"
packages = 2
cores_per_package = 64
threads_per_core = 2
nodes_per_package = 2
llcs_per_package = 8
memory_per_node = "768GiB"
hugepages_per_node = { "1GiB" = 64, "2MiB" = 1024 }
[model.four]
class = "gpu"
functions = ["audio", "other"]
[model.many]
class = "nic"
total_vfs = 32
vfs = 32
[[root]]
node = 0
bus = 0x10
ports = ["four@19:00.0", { model = "many", bdf = "1a:00.0" }]
[[root]]
node = 3
bus = 0x90
ports = ["four@9b:00.0"]
"""
_ARM_HOST = """name = "corpus"
architecture = "aarch64"
packages = 2
cores_per_package = 16
memory_per_node = "64GiB"
[[root]]
node = 1
domain = 2
ports = ["gpu"]
"""


def _definition(name: str) -> bytes:
    """The sample, its virtual function one that the host has."""
    return sample(name).replace(b"slot='0x10' function='0x3'", b"slot='0x04' function='0x0'")


def _rewritten(name: str, words: tuple[str, ...]) -> str:
    def in_directory(document: Path) -> str:
        host = document.with_name("host.toml")
        host.write_text(_ARM_HOST if "aarch64" in name else _CORPUS_HOST)
        output = document.with_name("tuned.xml")
        result = homenode("plan", document, "--host", host, "-o", output, "-q", *words, whole=True)
        if not output.exists():
            return _error_text(result)
        return projection.domain_text(output.read_bytes())

    return _in_file(_definition(name), "vm.xml", in_directory)


def rewritten() -> Iterator[Request]:
    """Definitions of the corpus in each layout, and with another size."""
    for name in NAMES:
        for layout in (*LAYOUTS[1:], "pin-numa-pci-smt"):
            words: tuple[str, ...] = ("--layout", layout)
            yield Request(f"{name} {layout}", partial(_rewritten, name, words))
            words = (*words, "--vcpus", "6", "--memory", "6GiB")
            yield Request(f"{name} {layout} 6x6GiB", partial(_rewritten, name, words))
    for layout, policy in product(("pin", "pin-numa"), ("memory-first", "spread", "any", "")):
        words = ("--layout", layout, *(("--policy", policy) if policy else ("--keep-vcpus",)))
        key = f"study {layout} {policy or 'keep-vcpus'}"
        yield Request(key, partial(_rewritten, "study", words))


def published() -> Iterator[Request]:
    """Published samples, by system, layout, metric and position."""
    counts: dict[str, int] = {}
    for system, layout, sample_fields in sorted(_published_samples(), key=str):
        words = (system, layout, sample_fields["metric"], sample_fields.get("variant"))
        key = " ".join(str(word).replace(" ", "_") for word in words if word is not None)
        counts[key] = counts.get(key, 0) + 1
        text = f"{sample_fields['value']:.10g} {sample_fields['unit']}"
        text += "".join(
            f" {name}={sample_fields[name]}"
            for name in ("statistic", "count", "device", "node", "peer_node", "size_bytes")
            if sample_fields.get(name) is not None
        )
        yield Request(f"{key} {counts[key]}", partial(str, text))


def _published_samples() -> Iterator[tuple[str, str, dict[str, Any]]]:
    directory = Path(__file__).parents[2] / "demo/published"
    for path in sorted(directory.rglob("*.json*")):
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        for fields in lines[1:]:
            if "metric" in fields:
                yield lines[0]["system"], lines[0]["name"], fields


def planned() -> Iterator[Request]:
    """Drawn hosts and requests: every value of the plan."""
    for number in range(240):
        yield Request(f"drawn-{number}", partial(drawn.planned, number))


def asked() -> Iterator[Request]:
    """Drawn hosts with devices and options of users: layout, plan or error."""
    for number in range(300):
        yield Request(f"drawn-{number}", partial(drawn_options.asked, number))


def decided() -> Iterator[Request]:
    """Drawn results: every value of effects and answers."""
    for number in range(120):
        yield Request(f"drawn-{number}", partial(drawn.decided, number))


KINDS: dict[str, Callable[[], Iterator[Request]]] = {
    "shipped": shipped,
    "auto": auto,
    "made": made,
    "rewritten": rewritten,
    "published": published,
    "planned": planned,
    "asked": asked,
    "decided": decided,
}
