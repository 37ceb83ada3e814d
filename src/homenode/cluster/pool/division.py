"""Division: which VM goes to which host and nodes, as a linear program in whole numbers."""

from collections import Counter
from collections.abc import Mapping, Sequence

from msgspec import Struct, field, structs
from msgspec.structs import replace

from homenode.bdf import Bdf
from homenode.cluster.pool.flavour import Flavour
from homenode.cluster.pool.model import Pool
from homenode.cluster.pool.place import PoolPlaces
from homenode.cluster.pool.planner import Planner
from homenode.cluster.pool.rules import Availability, Rules
from homenode.cluster.pool.solver import IntegerProgram
from homenode.cluster.pool.state import HostState
from homenode.errors import InputError
from homenode.machine.topology import with_certain_nodes
from homenode.plan.devices.options import stay_in_package
from homenode.plan.memory import overhead_bytes, reserve_bytes
from homenode.plan.request import GuestRequest
from homenode.plan.search.ladder import Concession
from homenode.plan.search.place import place
from homenode.units import MIB
from homenode.vm.layout import Pinning, Siblings
from homenode.vm.plan_model import Unplannable
from homenode.vm.plan_options import EmulatorPolicy

ALLOWED = {Concession.UNEQUAL_CELLS, Concession.UNEVEN_MEMORY}
"""What may give way in a packing."""


class RequestDocument(Struct, frozen=True):
    """A domain document that VMs are tuned from. source: what to call it in messages."""

    source: str
    content: bytes


class PackRequest(Struct, frozen=True, kw_only=True):
    """Equal VMs. names: one for each VM. document: None = plans only."""

    flavour: Flavour
    names: tuple[str, ...]
    rules: Rules = Rules()
    document: RequestDocument | None = None


class DivisionOption(Struct, frozen=True, kw_only=True):
    """One way to place a VM on a host. nodes: positions; () = anywhere on the host. away: GPUs that
    may be on other nodes. crossed: packages beyond the first. package: of all its GPUs, where they
    have to be of one."""

    nodes: tuple[int, ...]
    crossed: int
    away: int
    package: int | None = None


class Model(Struct, kw_only=True):
    program: IntegerProgram = field(default_factory=IntegerProgram)
    chosen: dict[tuple[int, int, int], int] = field(default_factory=dict)
    options: dict[tuple[int, int], tuple[DivisionOption, ...]] = field(default_factory=dict)
    used: list[int] = field(default_factory=list)


def grouped(requests: Sequence[PackRequest]) -> list[tuple[PackRequest, tuple[str, ...]]]:
    """Kinds of VM with the names of each. VMs with rules are a kind of their own."""
    kinds: list[tuple[PackRequest, tuple[str, ...]]] = []
    for request in requests:
        if request.rules.is_free:
            kinds.append((request, request.names))
        else:
            kinds += [(request, (name,)) for name in request.names]
    return kinds


def division_model(
    planner: Planner,
    pool: Pool,
    states: Sequence[HostState],
    kinds: Sequence[tuple[PackRequest, tuple[str, ...]]],
) -> Model:
    model = Model()
    program = model.program
    for h, state in enumerate(states):
        used = program.variable(1)
        model.used.append(used)
        capacity = Capacity(planner, state, [request.flavour for request, _ in kinds])
        rows: dict[tuple[str, int | None], list[tuple[int, int]]] = {}
        closed = pool.hosts[h].availability is not Availability.OPEN
        for t, (request, names) in enumerate(() if closed else kinds):
            asked = planner.request(state, request.flavour)
            if asked is None or _is_too_large(planner, state, request.flavour):
                continue
            if not _fits_alone(planner, state, request.flavour):
                continue  # nor next to others
            options = _options(capacity, asked, request.flavour)
            model.options[t, h] = options
            for o, option in enumerate(options):
                variable = program.variable(len(names))
                model.chosen[t, h, o] = variable
                for key, amount in capacity.needs(asked, request.flavour, option):
                    if amount:
                        rows.setdefault(key, []).append((variable, amount))
        for key, terms in rows.items():
            limit = capacity.limit(key)
            if limit is not None:
                # A host that has none of these VMs is not used.
                program.at_most([*terms, (used, -limit)], 0)
    for t, (_, names) in enumerate(kinds):
        every = [v for (kind, _, _), v in model.chosen.items() if kind == t]
        program.at_most([(v, 1) for v in every], len(names))
    _add_rules(model, pool, kinds)
    _keep_apart(model, pool, planner, kinds)
    _break_symmetry(model, states, kinds)
    return model


def _is_too_large(planner: Planner, state: HostState, flavour: Flavour) -> bool:
    return flavour.gpus > len(planner.free_units(state, flavour))


def _fits_alone(planner: Planner, state: HostState, flavour: Flavour) -> bool:
    """Whether the planner accepts the VM on the host, with what a packing may give up."""
    step, request = planner.step(state, flavour), planner.request(state, flavour)
    if step is None or request is None:
        return False
    if set(step.placement.concessions) <= ALLOWED:
        return True
    options = structs.replace(request.options, emulator_policy=EmulatorPolicy.SHARE)
    shared = replace(request, options=options)
    host = with_certain_nodes(planner.host(state))
    try:
        found = place(host, shared, planner.inventory(state.shape), brief=True)
    except (Unplannable, InputError):
        return False
    return set(found.concessions) <= ALLOWED


def _add_rules(
    model: Model, pool: Pool, kinds: Sequence[tuple[PackRequest, tuple[str, ...]]]
) -> None:
    program = model.program

    def members(key: str) -> Mapping[str, list[int]]:
        found: dict[str, list[int]] = {}
        for t, (request, _) in enumerate(kinds):
            group = getattr(request.rules, key)
            if group is not None:
                found.setdefault(group, []).append(t)
        return found

    def on(t: int, h: int) -> list[tuple[int, int]]:
        count = len(model.options.get((t, h), ()))
        return [(model.chosen[t, h, o], 1) for o in range(count)]

    for kind in members("anti_affinity").values():
        for h in range(len(pool.hosts)):
            program.at_most([term for t in kind for term in on(t, h)], 1)
    domains: dict[str, list[int]] = {}
    for h, host in enumerate(pool.hosts):
        domains.setdefault(host.failure_domain, []).append(h)
    for kind in members("fault_domains").values():
        for hosts in domains.values():
            program.at_most([term for t in kind for h in hosts for term in on(t, h)], 1)
    for kind in members("affinity").values():
        chosen = [program.variable(1) for _ in pool.hosts]
        program.at_most([(v, 1) for v in chosen], 1)
        for h, variable in enumerate(chosen):
            terms = [term for t in kind for term in on(t, h)]
            program.at_most([*terms, (variable, -len(kind))], 0)


def _keep_apart(
    model: Model,
    pool: Pool,
    planner: Planner,
    kinds: Sequence[tuple[PackRequest, tuple[str, ...]]],
) -> None:
    """No VM goes where one that is in the pool already forbids it."""
    places = PoolPlaces(pool, (), planner)
    for t, (request, _) in enumerate(kinds):
        excluded = () if request.rules.is_free else places.excluded(None, request.rules)
        for h, host in enumerate(pool.hosts if excluded else ()):
            if host.name in excluded and (t, h) in model.options:
                every = [(model.chosen[t, h, o], 1) for o in range(len(model.options[t, h]))]
                model.program.at_most(every, 0)


def _break_symmetry(
    model: Model,
    states: Sequence[HostState],
    kinds: Sequence[tuple[PackRequest, tuple[str, ...]]],
) -> None:
    """Use equal hosts in their order, if no rule distinguishes them."""
    if not all(request.rules.is_free for request, _ in kinds):
        return
    last: dict[HostState, int] = {}
    for h, state in enumerate(states):
        if state in last:
            model.program.at_most([(model.used[h], 1), (model.used[last[state]], -1)], 0)
        last[state] = h


class Capacity:
    """What a host in some state has free, by node and in sum."""

    def __init__(
        self, planner: Planner, state: HostState, flavours: Sequence[Flavour] = ()
    ) -> None:
        host = planner.host(state)
        self.nodes = [node for node in host.nodes if node.pus]
        self.host = host
        self.planner, self.state = planner, state
        self.packages = [node.package for node in self.nodes]
        self.package_indices = {package for package in self.packages if package is not None}
        self._gpus: dict[tuple[str | None, frozenset[Bdf]], str] = {}
        self._units: dict[str, list[int]] = {}
        self._named: dict[tuple[str | None, str | None], tuple[str | None, frozenset[Bdf]]] = {}
        for flavour in flavours:
            self.gpus(flavour)
        busy: set[int] = set()
        for vm in host.domains:
            for pin in vm.vcpu_pins:
                busy |= set(pin or ())
            busy |= set(vm.emulator_pus or ())
        free = [core for core in host.cores if not busy & set(core.pus)]
        self.cores = [sum(core.pus <= node.pus for core in free) for node in self.nodes]
        service = sum(number for _, number in state.cores)
        kept = planner.probe(state.shape).host_reserve.cores
        self.all_cores = max(0, len(free) - max(0, kept - service))
        self.threads = max((len(core.pus) for core in host.cores), default=1)
        probe = planner.probe(state.shape)
        self.memory: list[int | None] = []
        self.ordinary: list[int | None] = []
        for node in self.nodes:
            left = node.memory_free_bytes
            pools = sum(pool.page_bytes * pool.free_pages for pool in node.page_pools)
            if left is not None:
                left = max(0, left - reserve_bytes(probe, node))
            self.ordinary.append(None if left is None else left // MIB)
            self.memory.append(None if left is None else (left + pools) // MIB)

    def limit(self, key: tuple[str, int | None]) -> int | None:
        """How much there is of what `needs` names."""
        what, node = key
        if what == "cores":
            return self.all_cores if node is None else self.cores[node]
        if what in self._units:
            return self._units[what][-1 if node is None else node]
        sizes = self.memory if what == "memory" else self.ordinary
        if node is not None:
            return sizes[node]
        known = [size for size in sizes if size is not None]
        return sum(known) if len(known) == len(sizes) else None

    def gpus(self, flavour: Flavour | None) -> str:
        """The key of the GPUs, or parts, that a flavour may take; None = all GPUs. The numbers are
        those of each node, then of the host."""
        kind = ("", "") if flavour is None else (flavour.gpu_model, flavour.options.gpu_profile)
        if kind in self._named:
            return self._gpus[self._named[kind]]
        units = self.planner.free_units(self.state, flavour)
        named = self._named[kind] = kind[1], frozenset(units)
        if named not in self._gpus:
            key = self._gpus[named] = f"gpus {len(self._gpus)}"
            homes = [self.host.device_at[gpu].node for gpu in units]
            self._units[key] = [
                sum(
                    number
                    for number, home in zip(units.values(), homes, strict=True)
                    if home == node.index
                )
                for node in self.nodes
            ] + [sum(units.values())]
            package_of = {node.index: node.package for node in self.host.nodes}
            by_package = Counter[str]()
            for number, home in zip(units.values(), homes, strict=True):
                if home is not None:
                    by_package[of_package(key, package_of.get(home))] += number
            for package in {*self.packages}:
                self._units[of_package(key, package)] = [by_package[of_package(key, package)]]
        return self._gpus[named]

    def _gpus_shared(self, flavour: Flavour) -> tuple[str, ...]:
        """The keys of all sets of GPUs that share GPUs with the flavour's."""
        every, _ = self.gpus(None), self.gpus(flavour)
        profile, own = self._named[flavour.gpu_model, flavour.options.gpu_profile]
        return every, *(
            key
            for (other, gpus), key in self._gpus.items()
            if key != every and other == profile and gpus.issuperset(own)
        )

    def needs(
        self, request: GuestRequest, flavour: Flavour, option: DivisionOption
    ) -> list[tuple[tuple[str, int | None], int]]:
        """What a VM takes of each node of the option, and of the host."""
        cores = groups_of(request, self.threads)
        memory = (request.memory_bytes + overhead_bytes(request)) // MIB
        whole: list[tuple[tuple[str, int | None], int]] = [
            (("cores", None), cores),
            (("memory", None), memory),
        ]
        if request.page_bytes is None:
            whole.append((("ordinary memory", None), memory))
        gpus = self._gpus_shared(flavour) if flavour.gpus else ()
        whole += [((key, None), flavour.gpus) for key in gpus]
        count = len(option.nodes)
        for node in option.nodes:
            whole.append((("cores", node), -(-cores // count)))
            whole.append((("memory", node), memory // count))
            if request.page_bytes is None:
                whole.append((("ordinary memory", node), memory // count))
            if not option.away:
                own = flavour.gpus // count
                whole += [((key, node), own) for key in gpus]
                whole += [((of_package(key, self.packages[node]), None), own) for key in gpus]
        if option.package is not None:
            whole += [((of_package(key, option.package), None), flavour.gpus) for key in gpus]
        return whole


def of_package(gpus: str, package: int | None) -> str:
    """The key of those of these GPUs that are of a package."""
    return f"{gpus} of package {package}"


def groups_of(request: GuestRequest, threads: int) -> int:
    """Whole cores that the VM needs, as its layout pins them."""
    layout = request.layout
    if layout.pinning is Pinning.ALL_PUS and request.keep_vcpus:
        return -(-request.vcpus // threads)
    if layout.siblings is Siblings.EXPOSED and request.keep_vcpus:
        return -(-request.vcpus // threads)
    return 0 if layout.pinning is Pinning.NONE else request.vcpus


def _options(
    capacity: Capacity, request: GuestRequest, flavour: Flavour
) -> tuple[DivisionOption, ...]:
    """One node, the nodes of one package, all nodes, each with its GPUs on these nodes; and
    anywhere."""
    gpus, key = flavour.gpus, capacity.gpus(flavour)
    nodes = range(len(capacity.nodes))
    sets: list[tuple[int, ...]] = [(node,) for node in nodes]
    by_package: dict[object, list[int]] = {}
    for node in nodes:
        by_package.setdefault(capacity.packages[node], []).append(node)
    sets += [tuple(own) for own in by_package.values() if len(own) > 1]
    stay = stay_in_package(capacity.host, request.options, gpus) and not request.devices
    if len(by_package) > 1 and not stay:
        sets.append(tuple(nodes))
    found = []
    for one in sets:
        count = len(one)
        if gpus % count or request.vcpus % count:
            continue
        if any((capacity.limit((key, node)) or 0) < gpus // count for node in one):
            continue
        crossed = len({capacity.packages[node] for node in one}) - 1
        found.append(DivisionOption(nodes=one, crossed=crossed, away=0))
    crossed = max(0, len(by_package) - 1)
    found += [
        DivisionOption(nodes=(), crossed=crossed, away=max(1, gpus), package=package)
        for package in (sorted(capacity.package_indices) if stay else (None,))
        if package is None or (capacity.limit((of_package(key, package), None)) or 0) >= gpus
    ]
    return tuple(found)


def forbid_together(
    model: Model, states: Sequence[HostState], host: int, kinds: Sequence[int]
) -> None:
    """No host in the same state as this one gets all of these VMs again."""
    counts: dict[int, int] = {}
    for t in kinds:
        counts[t] = counts.get(t, 0) + 1
    program = model.program
    for h, state in enumerate(states):
        if state != states[host]:
            continue
        reached = []
        for t, count in counts.items():
            own = [(model.chosen[t, h, o], 1) for o in range(len(model.options.get((t, h), ())))]
            variable = program.variable(1)
            most = sum(program.limits[v] for v, _ in own)
            program.at_most([*own, (variable, -most)], count - 1)
            reached.append((variable, 1))
        program.at_most(reached, len(reached) - 1)
