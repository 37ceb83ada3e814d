"""Statement: what a proof is about, in plain numbers, as the plan's document has it.

docs/formats/proof.md says what each field means. Nodes, homes and GPUs are positions in the lists
of the facts.
"""

import re
from collections.abc import Iterable, Sequence
from typing import Any, Literal

import msgspec

from homenode.errors import InputError
from homenode.json_text import NotJsonError, decode_json

MOST_NODES = 1_024
MOST_VERTICES = 100_000
MOST_SIZE = 50_000_000
MOST_NUMBER = 1 << 62
_VERTEX = re.compile(
    r"[a-z_]{1,30}|(node|gpu|package) [0-9]{1,6}|groups [0-9]{1,6} [0-9]{1,6}", re.ASCII
)


class Home(msgspec.Struct, frozen=True, kw_only=True):
    """A node that devices lie on. node: its position, None where it has no PUs. distances,
    package_distances: to each node and each package."""

    host_node: int
    node: int | None
    distances: list[int]
    package_distances: list[int]


class Device(msgspec.Struct, frozen=True, kw_only=True):
    """A function that the VM gets in any case. counts: in the class of the worst device."""

    home: int
    is_gpu: bool
    counts: bool


class Gpu(msgspec.Struct, frozen=True, kw_only=True):
    """A GPU that the VM may get or gets in any case. home: None = unknown. functions: that come
    with it and have a known node. nics: homes of the VM's NICs that are paired with it, in other
    packages. link: number of its link group; None where no GPU of the host has one."""

    bdf: str
    position: int
    home: int | None
    functions: int
    nics: list[int]
    is_paired: bool
    link: int | None


class Facts(msgspec.Struct, frozen=True, kw_only=True):
    """What all steps have in common."""

    nodes: list[int]
    packages: list[int]
    distances: list[list[int]]
    homes: list[Home]
    devices: list[Device]
    gpus: list[Gpu]
    named_gpus: list[int]
    named_positions: list[int]
    gpu_count: int
    gpu_groups: list[list[int]]
    gpu_sets: list[list[int]]
    gpu_nodes: list[int]
    reserved: str
    locality: Literal["require", "prefer", "ignore"]
    most_nodes: int
    page_bytes: int
    huge_pages: bool
    packs: bool


Splits = Literal["equal", "any"]
Outcome = Literal["chosen", "no-set", "host-core", "worse", "not-better", "unproved"]


class Search(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """All sets of nodes of a step. least: nodes of a set that has the least first
    terms, which are `first`."""

    splits: Splits
    tree: list[str]
    least: list[int] | None = None
    first: list[int] = []


class Step(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One or several fallbacks of the ladder that come to the same numbers."""

    fallbacks: list[list[str]]
    outcome: Outcome
    groups: int
    reason: str = ""
    cores_left: int = 0
    cores_kept: int = 0
    equal: bool = False
    even: bool = False
    shares: bool = False
    sockets: bool = False
    barred: str = ""
    threads: int = 1
    counts_pus: bool = False
    kinds: list[str | None] = []
    supply: list[int] = []
    whole_cores: list[int] = []
    memory: Literal["follows", "together", "anywhere", "none"] = "none"
    pages: int = 0
    free_pages: list[int | None] = []
    pool_pages: list[int] = []
    device_pages: list[tuple[int, int]] = []
    counts: list[list[tuple[int, int, int]]] = []
    searches: list[Search] = []


class Proof(msgspec.Struct, frozen=True, kw_only=True):
    """terms: so many of the terms of the plan's cost are proved."""

    terms: int
    facts: Facts
    steps: list[Step]


class NotProved(msgspec.Struct, frozen=True, kw_only=True):
    """What a plan has in place of a proof that it cannot have."""

    not_proved: str


class Term(msgspec.Struct, frozen=True):
    name: str
    value: int | tuple[int, ...]


class Layout(msgspec.Struct, frozen=True):
    pcie: str


class Owned(msgspec.Struct, frozen=True):
    bdf: str


class PlanDocument(msgspec.Struct, frozen=True):
    """What a verifier reads of a plan's document."""

    policy: str
    layout: Layout
    rung: str
    nodes: list[int]
    devices: list[Owned]
    cost: list[Term]
    proof: dict[str, Any] | None = None


def decode_plan(content: bytes, source: str) -> tuple[PlanDocument, Proof | NotProved]:
    """A stored plan with its proof. Raises InputError for one without, or of another form."""
    try:
        plan = msgspec.convert(decode_json(content), PlanDocument)
        if plan.proof is None:
            raise InputError(
                f"{source}: expected a plan with a proof, found none",
                hint="plan again with --save-plan; plans of earlier versions have no proof",
            )
        if "not_proved" in plan.proof:
            return plan, msgspec.convert(plan.proof, NotProved)
        return plan, checked(msgspec.convert(plan.proof, Proof))
    except (NotJsonError, msgspec.ValidationError, ValueError) as error:
        raise InputError(f"{source}: expected a plan with a proof, found: {error}") from None


def checked(proof: Proof) -> Proof:
    """The proof, with lists of their lengths and numbers of their ranges. Raises ValueError."""
    facts, count = proof.facts, len(proof.facts.nodes)
    _check("nodes", [count], 1, MOST_NODES)
    _check("nodes", facts.nodes)
    _check("packages", facts.packages, 0, max(facts.packages, default=0))
    packages, homes, gpus = 1 + max(facts.packages, default=0), len(facts.homes), len(facts.gpus)
    rows: list[tuple[str, Sequence[object], int]] = [
        ("distances", one, count) for one in facts.distances
    ]
    rows += [("homes.distances", one.distances, count) for one in facts.homes]
    rows += [("homes.package_distances", one.package_distances, packages) for one in facts.homes]
    rows += [("packages", facts.packages, count), ("distances", facts.distances, count)]
    for step in proof.steps:
        _check("groups", [step.groups], 1, 1 << 16)
        _check("fallbacks", [len(step.fallbacks)], 1)
        _check("pages", [step.pages, *(pages for _, pages in step.device_pages)])
        if step.outcome in ("host-core", "unproved"):
            continue
        _check("device_pages", (cell for cell, _ in step.device_pages))
        _check("pages", [step.pages], step.memory != "none")
        for name, row in (
            ("supply", step.supply),
            ("whole_cores", step.whole_cores),
            ("pool_pages", step.pool_pages),
            ("free_pages", [0 if pages is None else pages for pages in step.free_pages]),
        ):
            _check(name, row)
            rows.append((name, row, count))
        if step.outcome == "chosen":
            rows.append(("counts", step.counts, count))
            for own, most in zip(step.counts, step.supply, strict=False):
                rows.append(("counts", own, most))
                _check("counts", (number for one in own for number in one))
    vertices = sum(len(search.tree) for step in proof.steps for search in step.searches)
    _check("tree", [vertices], 0, MOST_VERTICES)
    largest = max((step.groups for step in proof.steps), default=0)
    size = (
        count * count // 16 + largest + gpus * count + sum(1 + len(one) for one in facts.gpu_sets)
    )
    _check("tree times nodes, GPUs and groups", [vertices * size], 0, MOST_SIZE)
    for search in (search for step in proof.steps for search in step.searches):
        least = search.least or [0]
        _check("least", least, 0, count - 1)
        if least != sorted(set(least)):
            raise ValueError(f"least: expected nodes, ascending, found {least}")
        for vertex in search.tree:
            if not _VERTEX.fullmatch(vertex):
                raise ValueError(f"tree: expected a branch or what excludes it, found {vertex!r}")
    for name, values, length in rows:
        if len(values) != length:
            raise ValueError(f"{name}: expected {length} values, found {len(values)}")
    for far in (*facts.distances, *(one.distances for one in facts.homes)):
        _check("distances", far)
    _check("homes.package_distances", (d for one in facts.homes for d in one.package_distances))
    _check("homes.node", (one.node for one in facts.homes if one.node is not None), 0, count - 1)
    _check("devices.home", (one.home for one in facts.devices), 0, homes - 1)
    _check("gpus.home", (one.home for one in facts.gpus if one.home is not None), 0, homes - 1)
    _check("gpus.nics", (home for one in facts.gpus for home in one.nics), 0, homes - 1)
    _check("gpus.functions", (one.functions for one in facts.gpus))
    for name, sets in (("gpu_groups", facts.gpu_groups), ("gpu_sets", facts.gpu_sets)):
        _check(name, (gpu for one in sets for gpu in one), 0, gpus - 1)
        if any(len(set(one)) < len(one) for one in sets):
            raise ValueError(f"{name}: expected each GPU once")
    _check("named_gpus", facts.named_gpus, 0, gpus - 1)
    _check("gpu_nodes", facts.gpu_nodes, 0, count - 1)
    _check("gpu_count", [facts.gpu_count], 0, gpus)
    _check("most_nodes", [facts.most_nodes], 1)
    _check("page_bytes", [facts.page_bytes], 1)
    if any(facts.distances[a][b] != facts.distances[b][a] for a in range(count) for b in range(a)):
        raise ValueError("distances: expected as far there as back")
    if facts.nodes != sorted(set(facts.nodes)):
        raise ValueError("nodes: expected them ascending")
    return proof


def _check(name: str, numbers: Iterable[int], least: int = 0, most: int = MOST_NUMBER) -> None:
    for number in numbers:
        if not least <= number <= most:
            raise ValueError(f"{name}: expected numbers of {least} to {most}, found {number}")
