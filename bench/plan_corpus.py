"""Speed of planning over random large hosts: CPU seconds of one plan each, by seed. [I/O]

Run `python bench/plan_corpus.py [--seeds FIRST END] [--json FILE]`. A host has 16 to 64 nodes,
at most 1,024 PUs and 64 GPUs, and distances of one of six kinds; some of it is in use. With
--largest each host has the most of all. Prints the
median, the 99th percentile and the slowest seeds. Two files of --json are compared with
`--compare OLD NEW`: which costs differ, in which term, and which way.
"""

import argparse
import json
import random
import statistics
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from msgspec import structs
from tests.small_hosts import DeviceSpec, NodeSpec, asking, host_of, pinned_domain, small_request

from homenode.errors import UsageError
from homenode.machine.pci import DeviceKind
from homenode.machine.topology import Host, RunningDomain
from homenode.plan.planner import plan
from homenode.plan.request import GuestRequest
from homenode.units import GIB
from homenode.vm.plan import Unplannable
from homenode.vm.plan_options import Balance, DeviceLocality, Policy

MAX_PUS, MAX_GPUS = 1024, 64
SLOWEST = 8

Matrix = tuple[tuple[int, ...], ...]


def symmetric(count: int, distance: Any) -> Matrix:
    rows = [[10] * count for _ in range(count)]
    for a in range(count):
        for b in range(a):
            rows[a][b] = rows[b][a] = distance(a, b)
    return tuple(map(tuple, rows))


def distances_of(draw: random.Random, packages: Sequence[int]) -> Matrix | None:
    """Two levels, three levels, a row, a ring, wholly random, or random in both directions."""
    count, kind = len(packages), draw.randrange(6)
    if kind == 0:
        return None
    if kind == 1:
        near, middle, far = 12, draw.choice((16, 20)), draw.choice((32, 40))
        half = (max(packages) + 1) // 2 or 1
        return symmetric(
            count,
            lambda a, b: (
                near
                if packages[a] == packages[b]
                else middle
                if packages[a] // half == packages[b] // half
                else far
            ),
        )
    if kind == 2:
        return symmetric(count, lambda a, b: min(254, 10 + 3 * abs(a - b)))
    if kind == 3:
        return symmetric(count, lambda a, b: 10 + 4 * min(abs(a - b), count - abs(a - b)))
    levels = draw.choice(((12, 16, 22, 28), tuple(range(11, 60)), (20, 40)))
    if kind == 4:
        return symmetric(count, lambda a, b: draw.choice(levels))
    return tuple(
        tuple(10 if a == b else draw.choice(levels) for b in range(count)) for a in range(count)
    )


def host_of_seed(draw: random.Random) -> Host:
    count = draw.choice((16, 16, 20, 24, 32, 32, 40, 48, 64, 64))
    of_package = draw.choice((1, 2, 4, 8, count // 2))
    threads = draw.choice((1, 2, 2))
    most = MAX_PUS // (count * threads)
    cores = draw.randint(min(2, most), most)
    are_alike, llcs = draw.random() < 0.4, draw.choice((1, 1, 2, 4))
    sizes = draw.choice(((64, 64), (32, 96), (8, 64)))
    nodes = []
    memory = draw.randint(*sizes)
    for number in range(count):
        own = cores if are_alike else draw.randint(max(1, cores // 2), cores)
        parts = [own // llcs + (i < own % llcs) for i in range(llcs)]
        nodes.append(
            NodeSpec(
                tuple((threads,) * part for part in parts if part),
                package=number // of_package,
                memory_bytes=(memory if are_alike else draw.randint(*sizes)) * GIB,
            )
        )
    gpus = draw.choice((0, 4, 8, 16, 32, MAX_GPUS, MAX_GPUS))
    spread = draw.choice((count, count, max(1, count // 2), max(1, count // 4)))
    devices = []
    for number in range(gpus):
        node = draw.randrange(count) if draw.random() < 0.2 else number * spread // gpus
        known = None if draw.random() < 0.02 else node
        devices.append(DeviceSpec(f"{number:02x}:00.0", node=known, root=node, switch=number % 2))
        if number % 4 == 0 and draw.random() < 0.5:
            devices.append(
                DeviceSpec(f"{number:02x}:01.0", node=known, root=node, kind=DeviceKind.NIC)
            )
    host = host_of(
        nodes, distances=distances_of(draw, [one.package for one in nodes]), devices=devices
    )
    return structs.replace(host, domains=tuple(domains_of(draw, host)))


def domains_of(draw: random.Random, host: Host) -> list[RunningDomain]:
    """Domains on some of the PUs, with some of the memory and GPUs of their nodes."""
    busy = draw.choice((0.0, 0.0, 0.2, 0.5))
    domains = []
    for node in host.nodes:
        if draw.random() >= busy:
            continue
        its = [core.pus for core in host.cores if core.pus <= node.pus]
        own = draw.sample(its, draw.randint(1, max(1, len(its) // 2)))
        memory = draw.randint(1, 8) * GIB
        gpus = [one for one in host.devices_of_kind(DeviceKind.GPU) if one.node == node.index]
        domains.append(
            pinned_domain(
                ",".join(str(core) for core in own),
                name=f"vm{node.index}",
                memory_bytes=memory,
                memory_by_node=((int(node.index), memory),),
                devices=tuple(str(one.bdf) for one in gpus if draw.random() < 0.3),
            )
        )
    return domains


def request_of_seed(draw: random.Random, host: Host) -> GuestRequest:
    taken = {bdf for domain in host.domains for bdf in domain.devices}
    gpus = [one for one in host.devices_of_kind(DeviceKind.GPU) if one.bdf not in taken]
    fill = draw.choice((0.02, 0.1, 0.25, 0.4, 0.6, 0.8, 0.95))
    vcpus = max(1, int(len(host.cores) * fill))
    total = sum(node.memory_bytes or 0 for node in host.nodes) // GIB
    memory = max(1, int(total * min(0.95, fill * draw.choice((0.3, 0.8, 1.0, 1.2)))))
    chosen, named = None, []
    if gpus and draw.random() < 0.75:
        number = draw.randint(1, max(1, int(len(gpus) * draw.choice((0.1, 0.3, 0.5, 0.9)))))
        if draw.random() < 0.7:
            chosen = number
        else:
            named = [str(one.bdf) for one in draw.sample(gpus, number)]
    nics = [one for one in host.devices_of_kind(DeviceKind.NIC) if draw.random() < 0.1]
    layout = draw.choice(("pin", "pin", "pin-numa", "pin-numa-pci", "pin-numa-pci", "pin-numa-smt"))
    request = small_request(
        vcpus, memory * GIB, layout=layout, devices=[*named, *(str(one.bdf) for one in nics)]
    )
    policies = [Policy.CORES_FIRST] * 6 + [Policy.SPREAD, Policy.ANY]
    if layout == "pin-numa-smt":
        policies.append(Policy.MEMORY_FIRST)
    localities = [DeviceLocality.PREFER] * 8 + [DeviceLocality.REQUIRE, DeviceLocality.IGNORE]
    return asking(
        request,
        gpu_count=chosen,
        policy=draw.choice(policies),
        balance=draw.choice((None, None, Balance.PACK, Balance.SPREAD)),
        unequal_cells=draw.random() < 0.2,
        keep_vcpus=layout == "pin-numa-smt" and draw.random() < 0.5,
        device_locality=draw.choice(localities),
    )


def largest_of_seed(seed: int) -> tuple[Host, GuestRequest]:
    """Always 64 nodes, 1,024 PUs and 64 GPUs, with distances of four kinds, and any request."""
    draw = random.Random(seed)
    per_package = draw.choice((1, 2, 4, 8, 8, 16, 32))
    packages = [node // per_package for node in range(64)]
    threads = draw.choice((1, 2))
    cores, alike = (threads,) * (16 // threads), draw.random() < 0.3
    half = len(cores) // 2
    nodes = [
        NodeSpec(
            (cores[:half], cores[half:]) if draw.random() < 0.5 else (cores,),
            package=package,
            memory_bytes=(64 if alike else draw.randint(16, 96)) * GIB,
        )
        for package in packages
    ]
    kind = draw.randrange(4)
    if kind == 0:
        distances: Matrix | None = symmetric(64, lambda a, b: draw.randint(11, 254))
    elif kind == 1:
        distances = tuple(
            tuple(10 if a == b else draw.randint(11, 254) for b in range(64)) for a in range(64)
        )
    elif kind == 2:
        far, near = (20, 255), (12, 16, 20, 28, 32)
        distances = symmetric(64, lambda a, b: draw.choice(far if draw.random() < 0.15 else near))
    else:
        distances = distances_of(draw, packages)
    homes = [draw.randrange(64) if draw.random() < 0.5 else gpu for gpu in range(64)]
    devices = []
    for gpu, home in enumerate(homes):
        devices.append(DeviceSpec(f"{gpu:02x}:00.0", node=home, root=home, switch=gpu % 3))
        if gpu % 4 == 0:
            nic = DeviceSpec(f"{gpu:02x}:01.0", node=home, root=home, kind=DeviceKind.NIC)
            devices.append(nic)
    host = host_of(nodes, distances=distances, devices=devices)
    host = structs.replace(host, domains=tuple(domains_of(draw, host)))
    return host, _request_of_largest(draw, host)


def _request_of_largest(draw: random.Random, host: Host) -> GuestRequest:
    taken = {bdf for domain in host.domains for bdf in domain.devices}
    gpus = [one for one in host.devices_of_kind(DeviceKind.GPU) if one.bdf not in taken]
    fill = draw.choice((0.05, 0.1, 0.25, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9))
    vcpus = max(1, int(len(host.cores) * fill))
    total = sum(node.memory_bytes or 0 for node in host.nodes) // GIB
    memory = max(1, int(total * min(0.95, fill * draw.choice((0.3, 0.8, 1.0, 1.1, 1.2)))))
    number = draw.randint(1, max(1, int(len(gpus) * draw.choice((0.1, 0.3, 0.5, 0.5, 0.7, 0.9)))))
    chooses = draw.random() < 0.8
    presets = ("pin", "pin-numa", "pin-numa", "pin-numa-pci", "pin-numa-pci", "pin-numa-smt")
    layout = draw.choice(presets)
    named = [] if chooses else [str(one.bdf) for one in draw.sample(gpus, number)]
    localities = [DeviceLocality.PREFER] * 8 + [DeviceLocality.REQUIRE, DeviceLocality.IGNORE]
    return asking(
        small_request(vcpus, memory * GIB, layout=layout, devices=named),
        gpu_count=number if chooses else None,
        policy=draw.choice([Policy.CORES_FIRST] * 5 + [Policy.SPREAD, Policy.ANY]),
        balance=draw.choice((None, Balance.PACK, Balance.SPREAD)),
        unequal_cells=draw.random() < 0.4,
        device_locality=draw.choice(localities),
        keep_vcpus=layout == "pin-numa-smt" and draw.random() < 0.5,
    )


def result_of(seed: int, *, is_largest: bool = False) -> dict[str, Any]:
    """CPU seconds of the plan of a seed, and what the plan costs."""
    if is_largest:
        host, request = largest_of_seed(seed)
    else:
        draw = random.Random(seed)
        host = host_of_seed(draw)
        request = request_of_seed(draw, host)
    start = time.process_time()
    try:
        made = plan(host, request)
    except (Unplannable, UsageError) as error:
        return {"cpu_s": time.process_time() - start, "refused": error.message}
    taken = time.process_time() - start
    return {
        "cpu_s": taken,
        "fallback": made.fallback,
        "optimal": made.optimal,
        "cost": [[term.name, term.value] for term in made.cost],
    }


def difference(old: Mapping[str, Any], new: Mapping[str, Any]) -> str | None:
    """In a few words; None where the plans cost the same."""
    if "refused" in old or "refused" in new:
        return None if ("refused" in old) == ("refused" in new) else "one is refused"
    if old["fallback"].split(", ")[1:] != new["fallback"].split(", ")[1:]:
        return f"{old['fallback']} became {new['fallback']}"
    for (name, before), (_, after) in zip(old["cost"], new["cost"], strict=False):
        if before != after:
            return f"{name} {'better' if after < before else 'worse'}"
    return None


def compare(old: Path, new: Path) -> int:
    """Prints how the plans of two runs differ; 1 where one is worse."""
    before, after = (json.loads(path.read_text()) for path in (old, new))
    seeds = [seed for seed in before if seed in after]
    found = {seed: difference(before[seed], after[seed]) for seed in seeds}
    kinds = Counter(text for text in found.values() if text is not None)
    print(f"{len(seeds)} plans, {sum(kinds.values())} with another cost")
    for text, count in kinds.most_common():
        print(f"{count:>6}  {text}: {', '.join([s for s in seeds if found[s] == text][:12])}")
    marks = Counter(
        (str(before[seed].get("optimal")), str(after[seed].get("optimal"))) for seed in seeds
    )
    for (was, became), count in sorted(marks.items()):
        print(f"{count:>6}  optimal {was} became {became}")
    return int(any("worse" in text for text in kinds))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, nargs=2, default=(0, 200), metavar=("FIRST", "END"))
    parser.add_argument("--largest", action="store_true")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--compare", type=Path, nargs=2, metavar=("OLD", "NEW"))
    options = parser.parse_args()
    if options.compare:
        return compare(*options.compare)
    seeds = range(*options.seeds)
    results = {str(seed): result_of(seed, is_largest=options.largest) for seed in seeds}
    if options.json is not None:
        options.json.write_text(json.dumps(results))
    times = sorted(one["cpu_s"] for one in results.values())
    at_99 = times[min(len(times) - 1, len(times) * 99 // 100)]
    refused = sum("refused" in one for one in results.values())
    print(
        f"{len(times)} plans, {refused} refused: median {statistics.median(times):.3f} s of CPU, "
        f"99 % {at_99:.3f} s, most {times[-1]:.3f} s"
    )
    for seed in sorted(results, key=lambda one: -results[one]["cpu_s"])[:SLOWEST]:
        one = results[seed]
        what = one.get("fallback", "refused")
        print(f"  seed {seed}: {one['cpu_s']:.3f} s, optimal {one.get('optimal')}, {what}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
