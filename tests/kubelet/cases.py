"""Random machines, kubelet settings and pods: for the oracle as JSON, for us as values."""

import json
from random import Random
from typing import Any

from homenode.cluster.pods.admission import Admission, admit
from homenode.cluster.pods.cpu_assignment import AssignmentOptions, CpuPlace, CpuTopology
from homenode.cluster.pods.hints import bits
from homenode.cluster.pods.node import KubeletPolicies, Node, empty_node
from homenode.cluster.pods.pod import read_pod

GIB = 1 << 30
GPU, NIC, RDMA = "nvidia.com/gpu", "example.com/vf", "example.com/rdma"
Case = dict[str, Any]


def random_case(random: Random, pods: int = 4) -> Case:
    """Where there are more than four nodes, only CPUs are aligned: the kubelet goes through every
    combination of hints, and would not end."""
    machine = _machine(random)
    kubelet = _kubelet(random, machine)
    devices: dict[str, dict[str, list[int]]] = {}
    nodes = [node["ID"] for node in machine["Nodes"]]
    if len(nodes) > 4:
        kubelet["MemoryPolicy"] = "None"
    for resource, most, share in ((GPU, 8, 0.7), (NIC, 4, 0.7), (RDMA, 3, 0.25)):
        if random.random() < share and len(nodes) <= 4:
            devices[resource] = _devices(random, nodes, random.randint(1, most))
    cpus = sum(len(c["Threads"]) for n in machine["Nodes"] for c in n["Cores"])
    arrived = [_pod(random, i, cpus, machine, devices) for i in range(random.randint(1, pods))]
    return {**machine, "Kubelet": kubelet, "Devices": devices, "Pods": arrived}


def grace_case(random: Random, pods: int = 3) -> Case:
    """Nodes of GPU memory after those with CPUs, up to 36 in all; no memory is aligned."""
    with_cpus, every = 4, random.choice((10, 16, 36))
    nodes: list[Case] = []
    for node in range(every):
        threads = range(4 * node, 4 * node + 4) if node < with_cpus else range(0)
        cores = [{"Socket": node, "Uncore": node, "Threads": [thread]} for thread in threads]
        distances = [10 if node == to else 40 for to in range(every)]
        nodes.append(
            {
                "ID": node,
                "Memory": 8 * GIB * bool(cores),
                "HugePages": {},
                "Cores": cores,
                "Distances": distances,
            }
        )
    machine = {"Sockets": with_cpus, "Nodes": nodes}
    kubelet = {
        **_kubelet(random, machine),
        "MemoryPolicy": "None",
        "ReservedMemory": {},
        "CPUOptions": {},
        "TopologyOptions": {"max-allowable-numa-nodes": "36"},
    }
    devices = {GPU: {f"d{i}": [i] for i in range(with_cpus)}}
    arrived = [_pod(random, i, 4 * with_cpus, machine, devices) for i in range(pods)]
    return {**machine, "Kubelet": kubelet, "Devices": devices, "Pods": arrived}


def _machine(random: Random) -> Case:
    sockets = random.choice((1, 2, 2, 2, 4))
    per_socket = random.choice((1, 1, 2, 4)) if sockets < 4 else random.choice((1, 2))
    if random.random() < 0.03:
        sockets, per_socket = 2, 5  # more than the default of max-allowable-numa-nodes
    spans = sockets == 2 and random.random() < 0.05
    count = 1 if spans else sockets * per_socket
    cores, smt = random.randint(2, 6), random.choice((1, 2, 2))
    uncores = random.choice((1, 1, 2))
    interleaved = random.random() < 0.5
    physical = [(node, core) for node in range(count) for core in range(cores)]
    if random.random() < 0.3:
        physical.sort(key=lambda at: (at[1], at[0]))
    threads = {}
    for i, at in enumerate(physical):
        threads[at] = [i + t * len(physical) if interleaved else i * smt + t for t in range(smt)]
    if random.random() < 0.1:
        del threads[random.choice(physical[1:])]
    nodes: list[Case] = []
    sizes = random.sample(["2048", "1048576"], random.randint(0, 2))
    for node in range(count):
        members = [
            {
                "Socket": (core % 2 if spans else node // per_socket),
                "Uncore": node * uncores + core * uncores // cores,
                "Threads": threads[node, core],
            }
            for core in range(cores)
            if (node, core) in threads
        ]
        memory = random.choice((8, 8, 16)) * GIB
        pages = {}
        for size in sizes:
            most = 3 * GIB // (int(size) << 10)
            pages[size] = random.randint(0, most)
        nodes.append({"ID": node, "Memory": memory, "HugePages": pages, "Cores": members})
    if random.random() < 0.1 and count < 10:
        nodes.append(
            {"ID": count, "Memory": 4 * GIB, "HugePages": dict.fromkeys(sizes, 0), "Cores": []}
        )
    far = random.choice((21, 32))
    for made in nodes:
        row = []
        for other in nodes:
            a, b = made["ID"], other["ID"]
            near = a // per_socket == b // per_socket
            row.append(10 if a == b else random.choice((12, 12, 13)) if near else far)
        made["Distances"] = row
    return {"Sockets": sockets, "Nodes": nodes}


def _kubelet(random: Random, machine: Case) -> Case:
    policy = random.choice(
        ("none", "best-effort", "restricted", "restricted", "single-numa-node", "single-numa-node")
    )
    options = {}
    if random.random() < 0.4:
        options["prefer-closest-numa-nodes"] = "true"
    options["max-allowable-numa-nodes"] = "16"
    cpu: dict[str, str] = {}
    kind = random.randrange(6)
    if kind in (1, 2) or (kind == 3 and random.random() < 0.5):
        cpu["full-pcpus-only"] = "true"
    if kind in (2, 4):
        cpu["distribute-cpus-across-numa"] = "true"
    if kind == 5:
        cpu["distribute-cpus-across-cores"] = "true"
    if kind == 3:
        cpu["prefer-align-cpus-by-uncorecache"] = "true"
    with_cpus = len({n["ID"] for n in machine["Nodes"] if n["Cores"]})
    if policy != "single-numa-node" and machine["Sockets"] <= with_cpus and random.random() < 0.15:
        cpu["align-by-socket"] = "true"
    every = sorted(t for n in machine["Nodes"] for c in n["Cores"] for t in c["Threads"])
    listed = random.random() < 0.6
    reserved = random.sample(every, min(len(every), random.randint(1, 3))) if listed else []
    if listed and random.random() < 0.5:
        reserved = [t for n in machine["Nodes"][:1] for c in n["Cores"][:1] for t in c["Threads"]]
    memory = {}
    for node in machine["Nodes"]:
        if random.random() < 0.5 or node["ID"] == 0:
            memory[str(node["ID"])] = {"memory": random.choice((GIB // 2, GIB))}
    return {
        "TopologyPolicy": policy,
        "Scope": random.choice(("container", "pod")),
        "TopologyOptions": options,
        "CPUPolicy": "static" if random.random() < 0.9 else "none",
        "CPUOptions": cpu,
        "ReservedCPUs": ",".join(map(str, sorted(reserved))),
        "ReservedCPUCount": 0 if listed else random.randint(1, min(3, len(every))),
        "MemoryPolicy": "Static" if random.random() < 0.7 else "None",
        "ReservedMemory": memory,
    }


def _devices(random: Random, nodes: list[int], count: int) -> dict[str, list[int]]:
    silent = random.random() < 0.1
    found: dict[str, list[int]] = {}
    for i in range(count):
        on = [] if silent or random.random() < 0.03 else [random.choice(nodes)]
        if on and random.random() < 0.05:
            on = sorted({*on, random.choice(nodes)})
        found[f"d{i:02}"] = on
    return found


def _pod(
    random: Random, number: int, cpus: int, machine: Case, devices: dict[str, dict[str, list[int]]]
) -> Case:
    guaranteed = random.random() < 0.92
    sizes = list(machine["Nodes"][0]["HugePages"])
    containers = [
        _container(random, f"c{i}", cpus, sizes, devices, guaranteed)
        for i in range(random.choice((1, 1, 1, 2, 3)))
    ]
    inits = []
    for i in range(random.choice((0, 0, 0, 1, 2))):
        wanted = devices if random.random() < 0.3 else {}
        inits.append(_container(random, f"i{i}", max(2, cpus // 3), sizes, wanted, guaranteed))
        if random.random() < 0.3:
            inits[-1]["restartPolicy"] = "Always"
    spec: Case = {"containers": containers}
    if inits:
        spec["initContainers"] = inits
    return {"kind": "Pod", "metadata": {"name": f"p{number}"}, "spec": spec}


def _container(
    random: Random,
    name: str,
    cpus: int,
    sizes: list[str],
    devices: dict[str, dict[str, list[int]]],
    guaranteed: bool,
) -> Case:
    count = random.choice((1, 2, 2, 3, 4, 4, 6, 8, cpus // 4, cpus // 2, cpus - 4))
    cpu = max(1, count)
    spelled = random.choice((str(cpu),) * 7 + (f"{cpu}000m", f"{cpu}.0", f"{cpu}e0"))
    if random.random() < 0.1:
        spelled = random.choice(("500m", "1500m", "2.5", "0.1"))
    mib = random.choice((128, 512, 1024, 2048, 4096, 9000))
    memory = random.choice((f"{mib}Mi",) * 4 + (f"{mib / 1024:.3f}Gi", f"{mib}e6", f"{mib}000k"))
    limits = {"cpu": spelled, "memory": memory}
    for resource in ("cpu", "memory"):
        if random.random() < 0.02:
            del limits[resource]
    for size in sizes:
        if random.random() < 0.4:
            kind = "1Gi" if size == "1048576" else "2Mi"
            most = 4 if kind == "1Gi" else 1500
            unit = 1 if kind == "1Gi" else 2
            total = random.randint(1, most) * unit
            limits[f"hugepages-{kind}"] = f"{total}{'Gi' if kind == '1Gi' else 'Mi'}"
    for resource, named in devices.items():
        if random.random() < 0.6:
            limits[resource] = str(random.randint(1, max(1, min(len(named) + 1, 4))))
    found = {"name": name, "resources": {"limits": limits, "requests": dict(limits)}}
    if not guaranteed and random.random() < 0.8:
        found["resources"]["requests"]["cpu"] = "250m"  # type: ignore[index]
    return found


def node_of(case: Case) -> Node:
    kubelet = case["Kubelet"]
    cpu = kubelet["CPUOptions"]
    places: dict[int, CpuPlace] = {}
    memory: dict[int, dict[str, int]] = {}
    for node in case["Nodes"]:
        for core in node["Cores"]:
            for thread in core["Threads"]:
                places[thread] = CpuPlace(
                    core=min(core["Threads"]),
                    socket=core["Socket"],
                    node=node["ID"],
                    uncore=core["Uncore"],
                )
        memory[node["ID"]] = {"memory": node["Memory"]}
        for size, pages in node["HugePages"].items():
            kind = "1Gi" if size == "1048576" else "2Mi"
            memory[node["ID"]][f"hugepages-{kind}"] = pages * (int(size) << 10)
    reserved = kubelet["ReservedCPUs"]
    policies = KubeletPolicies(
        topology_policy=kubelet["TopologyPolicy"],
        scope=kubelet["Scope"],
        prefer_closest="prefer-closest-numa-nodes" in kubelet["TopologyOptions"],
        most_nodes=int(kubelet["TopologyOptions"]["max-allowable-numa-nodes"]),
        cpu_policy=kubelet["CPUPolicy"],
        assignment=AssignmentOptions(
            full_pcpus_only="full-pcpus-only" in cpu,
            distribute_cpus_across_numa="distribute-cpus-across-numa" in cpu,
            distribute_cpus_across_cores="distribute-cpus-across-cores" in cpu,
            prefer_align_cpus_by_uncorecache="prefer-align-cpus-by-uncorecache" in cpu,
        ),
        align_by_socket="align-by-socket" in cpu,
        reserved_cpus=frozenset(map(int, reserved.split(","))) if reserved else None,
        reserved_cpu_count=kubelet["ReservedCPUCount"],
        memory_policy=kubelet["MemoryPolicy"],
        reserved_memory_bytes={int(n): of for n, of in kubelet["ReservedMemory"].items()},
    )
    return empty_node(
        policies,
        tuple(node["ID"] for node in case["Nodes"]),
        tuple(tuple(node["Distances"]) for node in case["Nodes"]),
        CpuTopology(places, case["Sockets"]),
        memory,
        {r: {d: tuple(on) for d, on in named.items()} for r, named in case["Devices"].items()},
    )


def our_answers(case: Case) -> list[list[Any]]:
    """For each pod: the reason, "" where it is admitted, and CPUs and nodes of each container."""
    node = node_of(case)
    found = []
    for document in case["Pods"]:
        answer: Admission = admit(read_pod(document, "a pod"), node)
        node = answer.node
        reason = "" if answer.refusal is None else answer.refusal.reason
        found.append([reason, [[sorted(g.cpus), list(bits(g.mask or 0))] for g in answer.given]])
    return found


def oracle_answers(line: str) -> list[list[Any]]:
    """The same, of what the oracle wrote."""
    answers = json.loads(line)
    assert isinstance(answers, list), line
    return [
        [pod["reason"], [[_cpus(c["cpus"]), c["nodes"]] for c in pod["containers"]]]
        for pod in answers
    ]


def _cpus(text: str) -> list[int]:
    found: list[int] = []
    for part in text.split(",") if text else ():
        first, _, last = part.partition("-")
        found += range(int(first), int(last or first) + 1)
    return found
