"""Statement: what a proof is about, in plain numbers, as the plan's document has it.

docs/formats/proof.md says what each field means. Nodes, homes and GPUs are positions in the lists
of the facts.
"""

import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Literal

import msgspec

from homenode.errors import InputError
from homenode.json_text import NotJsonError, decode_json

VERSION = 2
MOST_NODES = 1_024
MOST_VERTICES = 100_000
MOST_SIZE = 50_000_000
MOST_NUMBER = 1 << 62
_VERTEX = re.compile(
    r"[a-z_]{1,30}|(node|gpu|package) [0-9]{1,6}|groups [0-9]{1,6} [0-9]{1,6}", re.ASCII
)


class Home(msgspec.Struct, frozen=True, kw_only=True):
    """A node that devices lie on. distances: to each package."""

    host_node: int
    distances: list[int]


class Device(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What the VM gets or may get. position: among the host's GPUs. host_node: where it lies, None
    = unknown. distances: to each node, of all functions that come with it. homes: that count in
    its class. node: a GPU's position; None = it is never away, the number of nodes = it always is.
    link: number of a GPU's link group. is_alone: it has no NIC, where other GPUs have one."""

    bdf: str = ""
    position: int | None = None
    host_node: int | None = None
    distances: list[int] = []
    homes: list[int] = []
    node: int | None = None
    link: int | None = None
    is_alone: bool = False


class Facts(msgspec.Struct, frozen=True, kw_only=True):
    """What all steps have in common. given: devices that the VM gets in any case; device_count: so
    many with those of one of `choices`."""

    nodes: list[int]
    packages: list[int]
    distances: list[list[int]]
    homes: list[Home]
    devices: list[Device]
    given: list[int]
    device_count: int
    choices: list[list[int]]
    gpu_sets: list[list[int]]
    reserved: str
    locality: Literal["require", "prefer", "ignore"]
    most_nodes: int
    page_bytes: int

    @property
    def gives_a_choice(self) -> bool:
        return self.device_count > len(self.given)


Splits = Literal["equal", "any"]
Outcome = Literal["chosen", "no-set", "host-core", "worse", "not-better", "unproved"]


Goal = Sequence[tuple[str, Any]]


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
    room: list[int] = []
    whole_cores: list[int] = []
    memory: Literal["follows", "together", "anywhere", "none"] = "none"
    pages: int = 0
    free_pages: list[int | None] = []
    costs: dict[str, list[list[int]]] = {}
    llc_parts: list[list[int]] = []
    searches: list[Search] = []


class Proof(msgspec.Struct, frozen=True, kw_only=True):
    """terms: so many of the terms of the plan's cost are proved."""

    version: int
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


_SHOWN: dict[Outcome, str] = {
    "no-set": "no set of nodes holds the VM",
    "host-core": "the host would keep too few cores",
    "worse": "each placement is farther away",
    "not-better": "no placement is nearer",
    "unproved": "not proved: ",
}
LISTS = ("nodes", "split", "gpus")


class PlanDocument(msgspec.Struct, frozen=True):
    """What a verifier reads of a plan's document."""

    policy: Literal["cores-first", "memory-first", "spread", "any"]
    layout: Layout
    rung: str
    nodes: list[int]
    devices: list[Owned]
    cost: list[Term]
    proof: dict[str, Any] | None = None

    @property
    def gave_way(self) -> list[str]:
        """What the fallback of the plan gives up, but for the equal cells that each may."""
        return [one for one in self.rung.split(", ")[1:] if one != "unequal cells"]

    def value(self, name: str) -> Any:
        return next(one.value for one in self.cost if one.name == name)


FIRST = {
    "any": ["nodes_spanned"],
    "cores-first": ["device_class", "packages_spanned", "nodes_spanned", "node_distance"],
    "memory-first": ["nodes_spanned", "device_class", "packages_spanned", "node_distance"],
    "spread": ["minus_nodes_spanned", "device_class", "packages_spanned", "node_distance"],
}
EVENNESS = ["lopsided_split", "guest_sockets", "unevenness"]
REST = """gpu_link_groups gpu_sets_lost unisolated_cores llcs_spanned unequal_llcs pages_to_reserve
balance_cores balance_memory gpus_without_nic unevenness gpu_nodes_used nodes split gpus""".split()


def plan_document(document: Any) -> PlanDocument:
    """What a verifier reads of a document. Raises ValidationError. Version 1 of the format had no
    `vm` around its devices and its layout."""
    vm = document.get("vm") if isinstance(document, dict) else None
    if isinstance(vm, dict):
        record = vm.get("record")
        layout = record.get("layout") if isinstance(record, dict) else None
        document = {**document, "devices": vm.get("hostdevs", []), "layout": layout}
    return msgspec.convert(document, PlanDocument)


def terms_of(plan: PlanDocument, step: Step) -> tuple[list[str], list[str]]:
    """The terms in the order of comparison: those that a set of nodes decides, and the rest."""
    first, rest = list(FIRST[plan.policy]), list(REST)
    if plan.policy != "any":
        place = (
            first.index("packages_spanned") + 1 if plan.layout.pcie == "mirrored" else len(first)
        )
        first.insert(place, "gpus_away_from_home")
        rest.insert(0, "device_distance")
    if step.even:
        rest = EVENNESS + [name for name in rest if name not in EVENNESS]
    return ["vcpus_beyond_cores"] * step.shares + first, rest


def conclusions(plan: PlanDocument, proof: Proof) -> list[str]:
    """What a true proof shows of a plan, in sentences."""
    names = [one.name for one in plan.cost]
    step = next(step for step in proof.steps if step.outcome == "chosen")
    is_equal = step.equal and len({*plan.value("split")}) == 1
    of_kind = "" if not step.reason else " with equal cells" if is_equal else ""
    terms = f"all {len(names)}"
    if proof.terms < len(names):
        terms = f"the first {proof.terms} of {len(names)}"
    said = [f"proved: no placement{of_kind} costs less, in {terms} terms of the cost"]
    said += [f"not proved: {step.reason}"] * bool(step.reason)
    said += [f"not proved: {', '.join(names[proof.terms :])}"] * (proof.terms < len(names))
    for other in proof.steps:
        fallbacks = (f'"{", ".join(one) or "nothing gives way"}"' for one in other.fallbacks)
        shown = _SHOWN.get(other.outcome)
        if shown is not None:
            said.append(f"fallback {' or '.join(fallbacks)}: {shown}{other.reason}")
    return said


def decode_plan(content: bytes, source: str) -> tuple[PlanDocument, Proof | NotProved]:
    """A stored plan with its proof. Raises InputError for one without, or of another form."""
    try:
        plan = plan_document(decode_json(content))
        if plan.proof is None:
            raise InputError(
                f"{source}: expected a plan with a proof, found none",
                hint="plan again with --save-plan; plans of earlier versions have no proof",
            )
        if "not_proved" in plan.proof:
            return plan, msgspec.convert(plan.proof, NotProved)
        if plan.proof.get("version", 1) != VERSION:
            raise InputError(
                f"{source}: expected a proof of version {VERSION}, "
                f"found version {plan.proof.get('version', 1)}",
                hint="plan again with --save-plan",
            )
        lists = [one.name for one in plan.cost if isinstance(one.value, tuple)]
        if lists != list(LISTS):
            raise ValueError(f"cost: expected lists for {', '.join(LISTS)}, found {lists}")
        return plan, checked(msgspec.convert(plan.proof, Proof))
    except (NotJsonError, msgspec.ValidationError, ValueError) as error:
        raise InputError(f"{source}: expected a plan with a proof, found: {error}") from None


def checked(proof: Proof) -> Proof:
    """The proof, with lists of their lengths and numbers of their ranges. Raises ValueError."""
    facts, count = proof.facts, len(proof.facts.nodes)
    _check("nodes", [count], 1, MOST_NODES)
    _check("nodes", facts.nodes)
    _check("packages", facts.packages, 0, max(facts.packages, default=0))
    packages, homes, devices = 1 + max(facts.packages, default=0), len(facts.homes), facts.devices
    rows: list[tuple[str, Sequence[object], int]] = [
        ("distances", one, count) for one in facts.distances
    ]
    rows += [("homes.distances", one.distances, packages) for one in facts.homes]
    rows += [("devices.distances", one.distances, count) for one in devices]
    rows += [("packages", facts.packages, count), ("distances", facts.distances, count)]
    for step in proof.steps:
        _check("groups", [step.groups], 1, 1 << 16)
        _check("fallbacks", [len(step.fallbacks)], 1)
        _check("pages", [step.pages])
        if step.outcome not in ("host-core", "unproved"):
            rows += _rows(step, count)
    vertices = sum(len(search.tree) for step in proof.steps for search in step.searches)
    _check("tree", [vertices], 0, MOST_VERTICES)
    largest = max((step.groups for step in proof.steps), default=0)
    size = count * count // 16 + largest + len(devices) * count
    size += sum(1 + len(one) for one in facts.gpu_sets)
    _check("tree times nodes, GPUs and groups", [vertices * size], 0, MOST_SIZE)
    most = {"node": count, "groups": count, "gpu": len(devices), "package": packages}
    for search in (search for step in proof.steps for search in step.searches):
        least = search.least or [0]
        _check("least", least, 0, count - 1)
        if least != sorted(set(least)):
            raise ValueError(f"least: expected nodes, ascending, found {least}")
        for vertex in search.tree:
            if not _VERTEX.fullmatch(vertex):
                raise ValueError(f"tree: expected a branch or what excludes it, found {vertex!r}")
            if " " in vertex:
                _check(vertex, [int(vertex.split()[1])], 0, most[vertex.split()[0]] - 1)
    for name, values, length in rows:
        if len(values) != length:
            raise ValueError(f"{name}: expected {length} values, found {len(values)}")
    _check("distances", (far for row in facts.distances for far in row))
    _check("homes.distances", (far for one in facts.homes for far in one.distances))
    _check("devices.distances", (far for one in devices for far in one.distances))
    _check("devices.homes", (home for one in devices for home in one.homes), 0, homes - 1)
    _check("devices.node", (one.node for one in devices if one.node is not None), 0, count)
    sets = [("choices", one) for one in facts.choices] + [
        ("gpu_sets", one) for one in facts.gpu_sets
    ]
    for name, one in (("given", facts.given), *sets):
        _check(name, one, 0, len(devices) - 1)
        if len(set(one)) < len(one):
            raise ValueError(f"{name}: expected each device once")
    if any(not set(facts.given).isdisjoint(one) for one in facts.choices):
        raise ValueError("choices: expected none of the devices that are given")
    _check("device_count", [facts.device_count], len(facts.given), len(devices))
    _check("most_nodes", [facts.most_nodes], 1)
    _check("page_bytes", [facts.page_bytes], 1)
    if any(facts.distances[a][b] != facts.distances[b][a] for a in range(count) for b in range(a)):
        raise ValueError("distances: expected as far there as back")
    if facts.nodes != sorted(set(facts.nodes)):
        raise ValueError("nodes: expected them ascending")
    return proof


def _rows(step: Step, count: int) -> Iterator[tuple[str, Sequence[object], int]]:
    """The lists of a step and how long they are, its numbers being of their ranges."""
    _check("pages", [step.pages], step.memory != "none")
    for name, row in (
        ("supply", step.supply),
        ("room", step.room),
        ("whole_cores", step.whole_cores),
        ("free_pages", [0 if pages is None else pages for pages in step.free_pages]),
    ):
        _check(name, row)
        yield name, row, count
    if any(most < room for most, room in zip(step.supply, step.room, strict=False)):
        raise ValueError("room: expected at most the supply")
    for name, of_nodes in [*step.costs.items(), ("llc_parts", step.llc_parts)]:
        if step.outcome == "chosen":
            yield name, of_nodes, count
        for own, most in zip(of_nodes, step.room, strict=False):
            _check(name, own, -MOST_NUMBER)
            _check(name, [len(own)], min(most, 1), most)


def _check(name: str, numbers: Iterable[int], least: int = 0, most: int = MOST_NUMBER) -> None:
    for number in numbers:
        if not least <= number <= most:
            raise ValueError(f"{name}: expected numbers of {least} to {most}, found {number}")
