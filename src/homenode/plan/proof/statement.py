"""Statement: what a proof is about, in plain numbers, as the plan's document has it.

docs/formats/proof.md says what each field means. Nodes, homes and GPUs are positions in the lists
of the facts.
"""

from collections.abc import Iterator, Sequence
from itertools import chain, combinations
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from homenode.errors import InputError
from homenode.json_text import NotJsonError, decode_json

VERSION = 3
MOST_NODES = 1_024
MOST_VERTICES = 100_000
MOST_SIZE = 50_000_000
MOST_NUMBER = 1 << 62
Number = Annotated[int, Meta(ge=0, le=MOST_NUMBER)]
Signed = Annotated[int, Meta(ge=-MOST_NUMBER, le=MOST_NUMBER)]
Positive = Annotated[int, Meta(ge=1, le=MOST_NUMBER)]
Groups = Annotated[int, Meta(ge=1, le=1 << 16)]
_BRANCH = r"(node|gpu|package) [0-9]{1,6}|groups [0-9]{1,6} [0-9]{1,6}"
Vertex = Annotated[str, Meta(pattern=rf"^([a-z_]{{1,30}}|{_BRANCH})\Z")]
"""A split of a family into two, or what excludes it."""


class FalseProofError(Exception):
    """Says what of a proof is false."""


def expect(is_so: object, what: str) -> None:
    if not is_so:
        raise FalseProofError(what)


class DeviceHome(msgspec.Struct, frozen=True, kw_only=True):
    """A node that devices lie on. distances: to the package of each node."""

    host_node: int
    distances: list[Number]


class Device(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What the VM gets or may get. position: among the host's GPUs. host_node: where it lies, None
    = unknown. distances: to each node, of all functions that come with it. homes: that count in
    its class. node: a GPU's position; None = it is never away, the number of nodes = it always is.
    is_alone: it has no NIC, where other GPUs have one."""

    bdf: str = ""
    position: int | None = None
    host_node: int | None = None
    distances: list[Number] = []
    homes: list[Number] = []
    node: Number | None = None
    is_alone: bool = False


class Facts(msgspec.Struct, frozen=True, kw_only=True):
    """What all steps have in common. given: devices that the VM gets in any case; device_count: so
    many with those of one of `choices`."""

    nodes: Annotated[list[Number], Meta(min_length=1, max_length=MOST_NODES)]
    packages: list[Number]
    distances: list[list[Number]]
    homes: list[DeviceHome]
    devices: list[Device]
    given: list[Number]
    device_count: Number
    choices: list[list[Number]]
    link_groups: list[list[Number]]
    gpu_sets: list[list[Number]]
    reserved: str
    locality: Literal["require", "prefer", "ignore"]
    most_nodes: Positive
    page_bytes: Positive

    @property
    def gives_a_choice(self) -> bool:
        return self.device_count > len(self.given)


Splits = Literal["equal", "any"]
Outcome = Literal["chosen", "no-set", "host-core", "worse", "not-better", "unproved"]


Goal = Sequence[tuple[str, Any]]


class Search(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """All sets of nodes of a step."""

    splits: Splits
    tree: list[Vertex]


class Step(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One or several fallbacks of the ladder that come to the same numbers."""

    fallbacks: Annotated[list[list[str]], Meta(min_length=1)]
    outcome: Outcome
    groups: Groups
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
    supply: list[Number] = []
    room: list[Number] = []
    cores: list[Number] = []
    memory: Literal["follows", "together", "anywhere", "none"] = "none"
    pages: Number = 0
    free_pages: list[Number | None] = []
    costs: dict[str, list[list[Signed]]] = {}
    llc_parts: list[list[Signed]] = []
    searches: list[Search] = []

    @property
    def compares_far(self) -> bool:
        """Whether unequal cells are excluded by the distance of their nodes as well."""
        return any("node_distance" in one.tree for one in self.searches if one.splits == "any")


class Proof(msgspec.Struct, frozen=True, kw_only=True):
    """terms: so many of the terms of the plan's cost are proved."""

    version: int
    terms: int
    facts: Facts
    steps: list[Step]

    @property
    def chosen(self) -> Step:
        return next(step for step in self.steps if step.outcome == "chosen")


class NotProved(msgspec.Struct, frozen=True, kw_only=True):
    """What a plan has in place of a proof that it cannot have."""

    not_proved: str


class Term(msgspec.Struct, frozen=True):
    name: str
    value: int | tuple[int, ...]


class PlanLayout(msgspec.Struct, frozen=True):
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
    layout: PlanLayout
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
NODE_COSTS = """unisolated_cores llcs_spanned pages_to_reserve balance_cores balance_memory
gpu_nodes_used""".split()
"""Terms that are sums of what each node costs; of a VM without GPUs also `gpu_sets_lost`."""
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
    step = proof.chosen
    is_equal = step.equal and len({*plan.value("split")}) == 1
    of_kind = " with equal cells" if is_equal else ""
    terms = f"all {len(names)}"
    if proof.terms < len(names):
        terms = f"the first {proof.terms} of {len(names)}"
    number = "more" if (plan.policy == "spread") is is_equal else "fewer"
    said = [
        f"proved: no placement{of_kind} on its fallback costs less, in {terms} terms of the cost"
    ]
    others = f"equal cells are farther, or on {number} nodes"
    if is_equal:
        others = f"unequal cells are no nearer, nor on {number} nodes"
        if step.compares_far:
            others = "unequal cells cost no less in the terms that the nodes decide"
    said += [f"proved: {others}"] * (step.equal and not step.reason)
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
        return plan, checked(plan, msgspec.convert(plan.proof, Proof))
    except (NotJsonError, msgspec.ValidationError, ValueError) as error:
        raise InputError(f"{source}: expected a plan with a proof, found: {error}") from None


def checked(plan: PlanDocument, proof: Proof) -> Proof:
    """The proof: of this plan, with lists of their lengths and positions within theirs. Raises
    ValueError."""
    facts, count, devices = proof.facts, len(proof.facts.nodes), proof.facts.devices
    trees = [search.tree for step in proof.steps for search in step.searches]
    _check_size(proof, trees)
    packages = 1 + max(facts.packages, default=0)
    rows: list[tuple[str, Sequence[object], int]] = [
        ("packages", facts.packages, count),
        ("distances", facts.distances, count),
        *(("distances", one, count) for one in facts.distances),
        *(("devices.distances", one.distances, count) for one in devices),
        *(("homes.distances", one.distances, count) for one in facts.homes),
    ]
    for step in proof.steps:
        if step.outcome not in ("host-core", "unproved"):
            rows += _rows(step, count)
        elif step.outcome == "host-core" and step.cores_left - step.groups >= step.cores_kept:
            raise ValueError(f"host-core: expected fewer than {step.cores_kept} cores to be left")
    for name, values, length in rows:
        if len(values) != length:
            raise ValueError(f"{name}: expected {length} values, found {len(values)}")
    sets = [facts.given, *facts.choices, *facts.link_groups, *facts.gpu_sets]
    below = {"node": count, "groups": count, "gpu": len(devices), "package": packages}
    splits = [vertex.split() for tree in trees for vertex in tree if " " in vertex]
    for name, numbers, end in (
        ("given, choices, link_groups, gpu_sets", sets, len(devices)),
        ("devices.homes", [one.homes for one in devices], len(facts.homes)),
        ("devices.node", [[one.node] for one in devices if one.node is not None], count + 1),
        *((split[0], [[int(split[1])]], below[split[0]]) for split in splits),
    ):
        found = next((number for row in numbers for number in row if number >= end), None)
        if found is not None:
            raise ValueError(f"{name}: expected numbers below {end}, found {found}")
    far, pairs = facts.distances, [(a, b) for a in range(count) for b in range(a + 1)]
    is_distance = all(far[a][b] == far[b][a] and (a != b or far[a][b] == 10) for a, b in pairs)
    free = [devices[one] for choice in facts.choices for one in choice]
    for is_so, what in (
        (all(len(set(one)) == len(one) for one in sets), "given, choices, …: each once"),
        (all(set(facts.given).isdisjoint(one) for one in facts.choices), "choices: none given"),
        (all(one.position is not None for one in free), "choices: GPUs of the host"),
        (facts.nodes == sorted({*facts.nodes}), "nodes, ascending"),
        (len(facts.given) <= facts.device_count <= len(devices), "device_count: of the devices"),
        (is_distance, "distances as far there as back, and 10"),
        *_of_plan(plan, proof),
    ):
        if not is_so:
            raise ValueError(f"expected {what}; found others")
    return proof


def _of_plan(plan: PlanDocument, proof: Proof) -> Iterator[tuple[bool, str]]:
    """Whether the proof has what the plan is, each with what was expected."""
    nodes, split, number = plan.value("nodes"), plan.value("split"), len(plan.cost)
    is_one = [step.outcome for step in proof.steps].count("chosen") == 1
    yield is_one, "one step that is chosen"
    is_new = all(a != b for a, b in combinations(proof.steps, 2))
    yield is_new, "each step once"
    names = [*chain(*terms_of(plan, proof.chosen))] if is_one else []
    yield [one.name for one in plan.cost] == names, f"the terms {names}"
    yield 0 < proof.terms <= number, f"1 to {number} terms that are proved"
    yield is_one and plan.gave_way in proof.chosen.fallbacks, f"a chosen step for {plan.gave_way}"
    is_set = {*plan.nodes} == {*nodes} <= {*proof.facts.nodes} and len({*nodes}) == len(nodes)
    yield is_set, f"the plan's nodes in its cost, {nodes}"
    yield len(nodes) == len(split) > 0 > max(split, default=0), "a part of each node in the cost"


def _rows(step: Step, count: int) -> Iterator[tuple[str, Sequence[object], int]]:
    """The lists of a step and how long they are."""
    if step.memory != "none" and not step.pages:
        raise ValueError("pages: expected some, found 0")
    for name in ("supply", "room", "cores", "free_pages"):
        yield name, getattr(step, name), count
    for few, many in ((step.room, step.supply), (step.cores, step.room)):
        if any(most < one for one, most in zip(few, many, strict=False)):
            raise ValueError("expected cores of at most the room, room of at most the supply")
    if step.outcome == "chosen" and {*step.costs} - {"gpu_sets_lost"} != {*NODE_COSTS}:
        raise ValueError(f"costs: expected {NODE_COSTS}, found {[*step.costs]}")
    for name, of_nodes in [*step.costs.items(), ("llc_parts", step.llc_parts)]:
        if step.outcome == "chosen":
            yield name, of_nodes, count
        for own, most in zip(of_nodes, step.room, strict=False):
            if not min(most, 1) <= len(own) <= most:
                raise ValueError(f"{name}: expected 1 to {most} values, found {len(own)}")


def _check_size(proof: Proof, trees: Sequence[Sequence[str]]) -> None:
    """What a verifier would take long for is no proof."""
    facts, count, vertices = proof.facts, len(proof.facts.nodes), sum(map(len, trees))
    size = count * count // 16 + max((step.groups for step in proof.steps), default=0)
    size += len(facts.devices) * count + sum(1 + len(one) for one in facts.gpu_sets)
    for name, found, most in (
        ("tree", vertices, MOST_VERTICES),
        ("tree times nodes, GPUs and groups", vertices * size, MOST_SIZE),
    ):
        if found > most:
            raise ValueError(f"{name}: expected at most {most}, found {found}")
