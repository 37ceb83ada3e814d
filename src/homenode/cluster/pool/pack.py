"""Pack: many VMs at once on the hosts of a pool: most value, then fewest packages, then hosts.

A solver divides the VMs among hosts and nodes by counting cores, memory and GPUs. The ordinary
planner then places each VM. A VM that it refuses there, or would place on shared cores or on the
host's memory, is tried on other hosts and is else left out. The solver's bound holds for all
packings on whole cores; the gap between the packing and the bound is printed.
"""

from collections.abc import Callable, Sequence
from itertools import product
from typing import Annotated

from msgspec import Meta, Struct, structs
from msgspec.structs import replace

from homenode.cluster.pool.division import (
    ALLOWED,
    Model,
    PackRequest,
    RequestDocument,
    division_model,
    forbid_together,
    grouped,
)
from homenode.cluster.pool.flavour import Flavour, FlavourTable, Format, Text
from homenode.cluster.pool.model import Pool, PoolHost, VmIdentity
from homenode.cluster.pool.place import PoolPlaces
from homenode.cluster.pool.planner import Planner
from homenode.cluster.pool.rules import Rules
from homenode.cluster.pool.solver import solve
from homenode.errors import InputError
from homenode.machine.topology import with_certain_nodes
from homenode.plan.placement import Placement
from homenode.plan.planner import as_placed
from homenode.plan.search.place import place
from homenode.plan.shape.assemble import assemble
from homenode.plan.stored import domain_of_plan
from homenode.toml_text import TomlTable, decode_toml
from homenode.vm.domain.read import read_vm
from homenode.vm.plan_model import Plan, Unplannable
from homenode.vm.plan_options import EmulatorPolicy
from homenode.wording import plural

MOST_VMS = 5000


class PackedVm(Struct, frozen=True, kw_only=True):
    """A VM with its host and its plan. document: what it is tuned from; None = plans only."""

    name: str
    host: str
    value: int
    plan: Plan
    document: RequestDocument | None = None
    rules: Rules = Rules()


class Packing(Struct, frozen=True, kw_only=True):
    """The outcome. bound: the most value that any packing on whole cores can have; None if the
    solver found nothing. packages_crossed: packages beyond the first of each VM. gpus_away: GPUs on
    none of their VM's nodes. hosts: number of hosts with one of these VMs. unplaced: (name,
    reason)."""

    vms: tuple[PackedVm, ...]
    unplaced: tuple[tuple[str, str], ...]
    value: int
    bound: float | None
    packages_crossed: int
    gpus_away: int
    hosts: int

    @property
    def gap(self) -> float | None:
        """How far the value may be below the best, as a share of the bound."""
        if self.bound is None:
            return None
        return 0.0 if self.bound <= 0 else max(0.0, 1 - self.value / self.bound)


def _no_documents(source: str) -> bytes:
    raise InputError(f"{source}: expected no document, since none can be read here")


class _RequestTable(FlavourTable, kw_only=True):
    count: Annotated[int, Meta(ge=1, le=MOST_VMS)] = 1
    document: Text | None = None
    affinity: Text | None = None
    anti_affinity: Text | None = None
    fault_domains: Text | None = None


class _RequestsFile(TomlTable, kw_only=True):
    format: Format
    vm: Annotated[
        tuple[_RequestTable, ...],
        Meta(
            min_length=1, max_length=MOST_VMS, extra={"expected": f"1 to {MOST_VMS} tables [[vm]]"}
        ),
    ]


def parse_requests(
    text: str, source: str, read_document: Callable[[str], bytes] = _no_documents
) -> tuple[PackRequest, ...]:
    """The requests of a TOML file of [[vm]] tables. read_document: the content of a document that
    a table names. Raises InputError, and what read_document raises."""
    found: list[PackRequest] = []
    names: set[str] = set()
    for table in decode_toml(text, _RequestsFile, source).vm:
        named, count = table.document, table.count
        document = None if named is None else RequestDocument(named, read_document(named))
        guest = None if document is None else read_vm(document.content, document.source)
        own = (
            tuple(f"{table.name}-{i}" for i in range(1, count + 1)) if count > 1 else (table.name,)
        )
        if names & set(own):
            expected = "names that no other VM has, with count NAME-1 to NAME-N"
            raise table.refusal("name", expected, table.name)
        names |= set(own)
        if len(names) > MOST_VMS:
            raise InputError(f"{source}: expected at most {MOST_VMS} VMs, found more")
        rules = Rules(
            affinity=table.affinity,
            anti_affinity=table.anti_affinity,
            fault_domains=table.fault_domains,
        )
        found.append(
            PackRequest(
                flavour=table.named(table.name, guest), names=own, rules=rules, document=document
            )
        )
    return tuple(found)


MOST_ROUNDS = 12
"""How often hosts whose VMs the planner refuses are divided again."""


def pack(pool: Pool, requests: Sequence[PackRequest], *, seconds: float = 60.0) -> Packing:
    """Place the VMs. Raises UsageError if the solver is not installed, InputError for a VM that the
    pool has already.

    If the planner refuses VMs that the solver put together on a host, this combination is forbidden
    and the solver runs again, while there is time. The bound is that of the first run.
    """
    there = {vm.name: host.name for host in pool.hosts for vm in host.domains}
    for name in (name for request in requests for name in request.names):
        if name in there:
            raise InputError(
                f"VM {name!r}: expected a new one, found it on {there[name]}",
                hint="homenode pool remove removes the record of a VM that was only placed",
            )
    planner = Planner(pool)
    states = [planner.state(host) for host in pool.hosts]
    groups = grouped(requests)
    model = division_model(planner, pool, states, groups)
    best: Packing | None = None
    bound: float | None = None
    left = seconds
    for number in range(MOST_ROUNDS):
        if number and left <= 0:
            break
        values, first, took = _divided(model, groups, max(1.0, left))
        if number == 0:
            bound = first
        left -= took
        wanted = _assigned(model, values, groups, len(pool.hosts))
        realised = _Realised(pool, planner, groups)
        found = realised.run(wanted, bound)
        if best is None or _order(found) < _order(best):
            best = found
        if not realised.refused or values is None or (best.gap == 0 and number):
            break
        for host, kinds in realised.refused:
            forbid_together(model, states, host, kinds)
    assert best is not None
    return best


def _order(packing: Packing) -> tuple[int, int, int, int]:
    return -packing.value, packing.packages_crossed, packing.gpus_away, packing.hosts


def _divided(
    model: Model, groups: Sequence[tuple[PackRequest, tuple[str, ...]]], seconds: float
) -> tuple[tuple[int, ...] | None, float | None, float]:
    """Values of the best division that was found, the bound of its value, and seconds."""
    kept = list(model.program.rows)
    value = [(v, groups[t][0].flavour.worth) for (t, _, _), v in model.chosen.items()]
    first = solve(model.program, value, seconds * 0.6)
    if first is None:
        return None, None, seconds
    answer, took = first, first.seconds
    model.program.at_least(value, first.gain)
    cost = [
        (v, -(100 * option.crossed + 10 * option.away))
        for (t, h, o), v in model.chosen.items()
        if (option := model.options[t, h][o]).crossed or option.away
    ]
    second = solve(model.program, cost, seconds * 0.25, first.values)
    if second is not None:
        model.program.at_least(cost, second.gain)
        took += second.seconds
        hosts = [(v, -1) for v in model.used]
        third = solve(model.program, hosts, seconds * 0.15, second.values)
        answer = third or second
        took += answer.seconds
    model.program.rows = kept
    return answer.values, first.bound, took


def _assigned(
    model: Model,
    values: Sequence[int] | None,
    kinds: Sequence[tuple[PackRequest, tuple[str, ...]]],
    hosts: int,
) -> list[list[int]]:
    """For each host the kinds of its VMs, the most GPUs first."""
    wanted: list[list[int]] = [[] for _ in range(hosts)]
    if values is None:
        return wanted
    for (t, h, _), variable in model.chosen.items():
        wanted[h] += [t] * values[variable]
    for own in wanted:
        own.sort(
            key=lambda t: (-kinds[t][0].flavour.gpus, -(kinds[t][0].flavour.options.vcpus or 0), t)
        )
    return wanted


class _Realised:
    """The solver's division, placed VM by VM with the ordinary planner."""

    def __init__(
        self, pool: Pool, planner: Planner, kinds: Sequence[tuple[PackRequest, tuple[str, ...]]]
    ) -> None:
        self.pool, self.kinds = pool, kinds
        self.places = PoolPlaces(pool, (), planner)
        self.left = [list(names) for _, names in kinds]
        self.vms: list[PackedVm] = []
        self.refused: list[tuple[int, tuple[int, ...]]] = []

    def run(self, wanted: Sequence[Sequence[int]], bound: float | None) -> Packing:
        for number, (host, own) in enumerate(zip(self.pool.hosts, wanted, strict=True)):
            if not self._fill(host.name, own):
                self.refused.append((number, tuple(own)))
        order = sorted(range(len(self.kinds)), key=lambda t: -self.kinds[t][0].flavour.worth)
        for t in order:
            while self.left[t]:
                names = (one.host.name for one in self.places.ranked(self.kinds[t][0].flavour))
                if not any(self._try(t, name) for name in list(names)):
                    break
        unplaced = tuple(
            (name, reason)
            for t, names in enumerate(self.left)
            for reason in ([self._reason(t)] if names else [])
            for name in names
        )
        crossed = sum(self._term(vm.plan, "packages_spanned") - 1 for vm in self.vms)
        away = sum(self._term(vm.plan, "gpus_away_from_home") for vm in self.vms)
        value = sum(vm.value for vm in self.vms)
        return Packing(
            vms=tuple(self.vms),
            unplaced=unplaced,
            value=value,
            bound=bound,
            packages_crossed=max(0, crossed),
            gpus_away=away,
            hosts=len({vm.host for vm in self.vms}),
        )

    @staticmethod
    def _term(plan: Plan, name: str) -> int:
        found = next((term.value for term in plan.cost if term.name == name), 0)
        return found if isinstance(found, int) else 0

    def _fill(self, name: str, own: Sequence[int]) -> bool:
        """Plan the host's VMs, each emulator on its own core if all VMs fit that way; else all
        emulators on the cores of their VMs, in several orders of VMs. Returns whether all fit."""

        def size(t: int) -> tuple[int, int]:
            options = self.kinds[t][0].flavour.options
            return -(options.memory_bytes or 0), -(options.vcpus or 0)

        best: list[tuple[int, Plan]] = []
        orders = (list(own), sorted(own, key=size), sorted(own, key=lambda t: size(t)[1]))
        for emulator, order in product((EmulatorPolicy.AUTO, EmulatorPolicy.SHARE), orders):
            made = self._planned(name, order, emulator)
            if len(made) > len(best):
                best = made
            if len(made) == len(own):
                break
        for t, plan in best:
            self._keep(t, name, plan)
        return len(best) == len(own)

    def _planned(
        self, name: str, own: Sequence[int], emulator: EmulatorPolicy
    ) -> list[tuple[int, Plan]]:
        """The plans of as many of these as the planner accepts one after the other."""
        made: list[tuple[int, Plan]] = []
        host = self.places.host(name)
        in_use: dict[int, int] = {}
        for t in own:
            at = in_use.get(t, 0)
            rules = self.kinds[t][0].rules
            if at >= len(self.left[t]) or not self._may(rules, self.places.host(name)):
                continue
            plan = self._plan(t, self.left[t][at], host, emulator)
            if plan is not None:
                made.append((t, plan))
                in_use[t] = at + 1
                host = structs.replace(host, domains=(*host.domains, domain_of_plan(plan)))
        return made

    def _plan(
        self, t: int, vm: str, one: PoolHost, emulator: EmulatorPolicy = EmulatorPolicy.AUTO
    ) -> Plan | None:
        """The VM's plan; None if the planner refuses it, or gives up more than a packing may."""
        flavour = self.kinds[t][0].flavour
        host = with_certain_nodes(self.places.planner.real_host(one, flavour))
        try:
            asked = flavour.request(host, vm)
            options = structs.replace(asked.options, emulator_policy=emulator)
            asked = replace(asked, options=options)
            found: Placement = place(host, asked)
            if not set(found.concessions) <= ALLOWED:
                return None
            return assemble(host, as_placed(asked, found), found)
        except (Unplannable, InputError):
            return None

    def _try(self, t: int, name: str) -> bool:
        """Place one more VM on the host, its emulator on its own core or else on shared ones."""
        one = self.places.host(name)
        if not self.left[t] or not self._may(self.kinds[t][0].rules, one):
            return False
        for emulator in (EmulatorPolicy.AUTO, EmulatorPolicy.SHARE):
            plan = self._plan(t, self.left[t][0], one, emulator)
            if plan is not None:
                self._keep(t, name, plan)
                return True
        return False

    def _reason(self, t: int) -> str:
        """Why no host takes a VM of the kind in addition to those that were placed."""
        request = self.kinds[t][0]
        hosts = [one.host for one in self.places.ranked(request.flavour)]
        if not hosts:
            return self._refusal(request.flavour)
        if any(self._may(request.rules, host) for host in hosts):
            return (
                "it fits only on the host's last core, on the host's memory or on shared cores, "
                "which a packing does not give: pool place does"
            )
        return "its affinity, anti-affinity or fault domains leave no host that takes it"

    def _refusal(self, flavour: Flavour) -> str:
        """Why every host refuses the flavour: too few GPUs, refused even when empty, or in use."""
        planner = self.places.planner
        every = (
            planner.gpus(one.shape) - planner.unfit(one.shape, flavour) for one in self.pool.hosts
        )
        if all(len(gpus) < flavour.gpus for gpus in every):
            kind = flavour.options.gpu_profile or flavour.gpu_model
            return f"no host has {plural(flavour.gpus, 'GPU')}" + (f" of {kind}" if kind else "")
        empty = {planner.empty(state) for state, _ in self.places.members()}
        if any(planner.step(state, flavour) is not None for state in empty):
            return "the VMs that run and those placed above leave no host that takes it"
        alone = PoolPlaces(self.pool, (), planner)
        for host in self.pool.hosts:
            for vm in host.domains:
                alone.take_from(host.name, VmIdentity.of(vm))
        refused = alone.refusals(flavour, most=1)
        reasons = (": ".join(filter(None, (one.reason, one.detail))) for one in refused[:1])
        return ": ".join(("no host of the pool takes it, even when empty", *reasons))

    def _keep(self, t: int, name: str, plan: Plan) -> None:
        request = self.kinds[t][0]
        self.left[t].remove(plan.vm.name)
        self.places.add(name, domain_of_plan(plan), request.rules)
        self.vms.append(
            PackedVm(
                name=plan.vm.name,
                host=name,
                value=request.flavour.worth,
                plan=plan,
                document=request.document,
                rules=request.rules,
            )
        )

    def _may(self, rules: Rules, host: PoolHost) -> bool:
        """Whether the rules allow the VM there."""
        return host.name not in self.places.excluded(None, rules)
