"""What still fits: against the planner asked one VM at a time, and against a closed form."""

import random

import pytest
from msgspec import structs
from msgspec.structs import replace

from homenode.cluster.pool.flavour import Flavour, default_flavours, parse_flavours, share_of
from homenode.cluster.pool.model import passable_gpus
from homenode.cluster.pool.outlook import outlook
from homenode.cluster.pool.planner import Planner
from homenode.errors import InputError
from homenode.machine.pci import GpuPart, PartKind
from homenode.machine.topology import Host, HostReserve, PagePool
from homenode.plan.planner import plan
from homenode.plan.search.cost import INDICES
from homenode.plan.search.place import place
from homenode.plan.stored import domain_of_plan
from homenode.units import GIB
from homenode.vm.plan_model import Unplannable
from homenode.vm.plan_options import EmulatorPolicy, PlanOptions, cell_asked
from tests.pool.pools import filled, pool_of, shipped, sized, with_free_memory, with_vm
from tests.small_hosts import asking


def _one_at_a_time(host: Host, flavour: Flavour) -> int:
    number = 0
    while True:
        try:
            host = with_vm(host, flavour, f"more-{number}")
        except Unplannable:
            return number
        number += 1


@pytest.mark.parametrize("seed", range(6))
def test_what_fits_is_what_the_planner_places_one_at_a_time(seed: int) -> None:
    host = filled(shipped("hgx-h100"), seed)
    found = outlook(pool_of([("a", host)]), default_flavours())
    for flavour, fit in zip(default_flavours(), found.hosts[0].fits, strict=True):
        assert fit.local + fit.degraded == _one_at_a_time(host, flavour), flavour.name


@pytest.mark.parametrize("name", ["small-2n8c-2gpu", "epyc-nps4-gpu-nic", "gh200x4"])
def test_every_gpu_of_an_empty_host_fits_a_vm_with_its_share(name: str) -> None:
    host = shipped(name)
    found = outlook(pool_of([("a", host)]), default_flavours())
    assert found.hosts[0].fits[0].local == found.free.gpus
    assert found.stranded == ()


def test_hosts_that_are_alike_are_planned_once() -> None:
    host = filled(shipped("hgx-h100"), 3)
    renamed = structs.replace(
        host, domains=tuple(structs.replace(vm, name=f"{vm.name}-b") for vm in host.domains)
    )
    pool = pool_of([("a", host), ("b", renamed), ("c", host)])
    planner = Planner(pool)
    found = outlook(pool, default_flavours(), planner)
    asked = planner.asked
    alone = Planner(pool_of([("a", host)]))
    outlook(alone.pool, default_flavours(), alone)
    assert (len(pool.shapes), found.states) == (1, 1)
    assert asked == alone.asked
    assert len({one.fits for one in found.hosts}) == 1


def test_states_that_differ_in_which_of_like_gpus_and_nodes_are_in_use_have_one_form() -> None:
    host = shipped("hgx-h100")
    vm = with_vm(host, default_flavours()[0], "vm").domains[0]
    gpus = [gpu.bdf for gpu in passable_gpus(host)]
    pool = pool_of(
        [
            (f"h{i}", structs.replace(host, domains=(structs.replace(vm, devices=(gpu,)),)))
            for i, gpu in enumerate(gpus[:4])
        ]
    )
    planner = Planner(pool)
    states = [planner.state(one) for one in pool.hosts]
    assert len(set(states)) == 4
    assert len({planner.canonical(state) for state in states}) == 1
    assert planner.canonical(planner.canonical(states[0])) == planner.canonical(states[0])


def test_nodes_stand_for_each_other_although_each_has_a_gpu_that_no_vm_can_have() -> None:
    host = shipped("hgx-h100")
    divided = {gpus[0].bdf for gpus in (passable_gpus(host)[:4], passable_gpus(host)[4:])}
    part = GpuPart(PartKind.MIG, "1g.10gb", number=1)
    devices = tuple(
        structs.replace(one, parts=(part,)) if one.bdf in divided else one
        for one in host.pci_devices
    )
    found = outlook(
        pool_of([("a", structs.replace(host, pci_devices=devices))]),
        [sized(name="g", gpus=1, vcpus=8, memory_bytes=GIB)],
    )
    assert found.hosts[0].fits[0].local == 6


@pytest.mark.parametrize("name", ["hgx-h100", "epyc-nps4-gpu-nic", "small-2n8c-2gpu"])
def test_the_canonical_form_of_a_state_gives_the_cost_that_the_state_itself_gives(
    name: str,
) -> None:
    pool = pool_of([(f"h{i}", filled(shipped(name), i, 5)) for i in range(3)])
    planner = Planner(pool)
    for one in pool.hosts:
        state = planner.state(one)
        for flavour in default_flavours()[:2]:
            form, exact = planner.step(state, flavour), planner.exact_step(state, flavour)
            assert (form is None) == (exact is None)
            if form is not None and exact is not None:
                terms = [
                    [term for term in step.placement.cost if term.name not in INDICES]
                    for step in (form, exact)
                ]
                assert terms[0] == terms[1]
                assert planner.canonical(form.after) == planner.canonical(exact.after)


def test_huge_pages_that_are_reserved_limit_what_fits() -> None:
    host = shipped("hgx-h100")
    nodes = tuple(
        structs.replace(node, page_pools=(PagePool(GIB, 500, 500 if node.index else 200),))
        for node in host.nodes
    )
    host = structs.replace(host, nodes=nodes)
    flavour = sized(name="huge", gpus=1, vcpus=8, memory_bytes=100 * GIB, page_bytes=GIB)
    found = outlook(pool_of([("a", host)]), [flavour])
    fit = found.hosts[0].fits[0]
    assert fit.local + fit.degraded == _one_at_a_time(host, flavour)
    assert fit.local >= 6


def test_free_memory_that_decides_nothing_is_not_asked_for_twice() -> None:
    host = shipped("hgx-h100")
    pool = pool_of([(f"h{i}", host) for i in range(20)])
    rng = random.Random(5)
    sizes = [[(1000 - rng.randrange(20)) * GIB for _ in host.nodes] for _ in pool.hosts]
    pool = with_free_memory(pool, sizes)
    flavours = tuple(
        sized(name=f"g{n}", gpus=n, vcpus=12 * n, memory_bytes=200 * GIB * n) for n in (1, 2, 4, 8)
    )
    planner = Planner(pool)
    found = outlook(pool, flavours, planner)
    assert found.states > 10
    assert planner.asked < 40
    assert {one.fits[0].local for one in found.hosts} == {8}


@pytest.mark.parametrize("free_gib", [70, 225, 236, 237, 238, 430, 450, 640, 660])
def test_where_memory_decides_the_planner_is_asked_with_it(free_gib: int) -> None:
    flavour = sized(name="one", gpus=1, vcpus=12, memory_bytes=200 * GIB)
    host = shipped("hgx-h100")
    nodes = tuple(
        structs.replace(node, memory_free_bytes=(free_gib if node.index == 0 else 1000) * GIB)
        for node in host.nodes
    )
    host = structs.replace(host, nodes=nodes)
    found = outlook(pool_of([("a", host)]), [flavour])
    fit = found.hosts[0].fits[0]
    assert fit.local + fit.degraded == _one_at_a_time(host, flavour)


def test_a_gpu_whose_node_has_no_cores_left_is_stranded_for_want_of_cores() -> None:
    host = shipped("hgx-h100")
    big = sized(name="big", gpus=1, vcpus=50, memory_bytes=100 * GIB)
    host = with_vm(host, big, "big")
    found = outlook(pool_of([("a", host)]), default_flavours())
    assert [(one.missing, one.gpus) for one in found.stranded] == [("cores", 3)]
    assert found.hosts[0].fits[0].local == 4


def test_a_gpu_whose_node_has_no_memory_left_is_stranded_for_want_of_memory() -> None:
    host = with_vm(
        shipped("hgx-h100"), sized(name="big", gpus=1, vcpus=4, memory_bytes=900 * GIB), "big"
    )
    found = outlook(pool_of([("a", host)]), default_flavours())
    assert [(one.missing, one.gpus) for one in found.stranded] == [("memory", 3)]


def test_gpus_too_few_for_every_flavour_are_stranded_for_want_of_gpus() -> None:
    host = with_vm(shipped("hgx-h100"), sized(name="one", gpus=1), "vm")
    pairs = tuple(flavour for flavour in default_flavours() if flavour.gpus > 1)
    found = outlook(pool_of([("a", host)]), pairs)
    assert [(one.missing, one.gpus) for one in found.stranded] == [("gpus", 1)]


def _vmcap(nodes: list[int], cells: int) -> int:
    """How many more VMs of `cells` cells fit where each cell is on a node of its own: the closed
    form of arXiv 2604.15033."""
    ordered = sorted(nodes, reverse=True)
    return min((sum(nodes) - sum(ordered[:r])) // (cells - r) for r in range(cells))


def _most(nodes: list[int], cells: int) -> int:
    """The same by taking the fullest nodes first, which is optimal."""
    count, left = 0, list(nodes)
    while True:
        left.sort(reverse=True)
        if left[cells - 1] < 1:
            return count
        for node in range(cells):
            left[node] -= 1
        count += 1


def test_the_closed_form_is_what_greedy_placement_of_cells_gives() -> None:
    rng = random.Random(2)
    for _ in range(300):
        nodes = [rng.randrange(7) for _ in range(rng.randint(1, 6))]
        cells = rng.randint(1, len(nodes))
        assert _vmcap(nodes, cells) == _most(nodes, cells)


@pytest.mark.parametrize("cells", [1, 2])
@pytest.mark.parametrize("seed", range(5))
def test_vms_of_k_cells_fit_a_host_of_n_nodes_as_often_as_the_closed_form_says(
    cells: int, seed: int
) -> None:
    """Each cell has 4 vCPUs; nodes differ in free cores; every cell is to be on its own node."""
    rng = random.Random(seed)
    host = shipped("hgx-h100")
    busy = [rng.randrange(0, 40) for _ in host.nodes]
    for node, count in zip(host.nodes, busy, strict=True):
        if count:
            filler = sized(
                name="filler",
                gpus=0,
                vcpus=count,
                memory_bytes=GIB,
                options=PlanOptions(layout="pin-numa"),
            )
            request = asking(
                filler.request(host),
                explicit_cells=(cell_asked(count, GIB, node.index),),
                guest=structs.replace(filler.request(host).guest, name=f"filler-{node.index}"),
                emulator_policy=EmulatorPolicy.NONE,
            )
            host = structs.replace(
                host, domains=(*host.domains, domain_of_plan(plan(host, request)))
            )
    free = [(56 - count) // 4 for count in busy]
    placed = 0
    while True:
        wanted = sized(
            name="vm",
            gpus=0,
            vcpus=4 * cells,
            memory_bytes=cells * GIB,
            options=PlanOptions(layout="pin-numa"),
        )
        request = asking(
            wanted.request(host),
            host_reserve=HostReserve(0, 0),
            emulator_policy=EmulatorPolicy.NONE,
            explicit_cells=tuple(cell_asked(4, GIB, node.index) for node in host.nodes[:cells])
            if cells == len(host.nodes)
            else (),
        )
        request = replace(request, guest=structs.replace(request.guest, name=f"vm-{placed}"))
        try:
            placement = place(host, request)
        except Unplannable:
            break
        if placement.concessions or len(placement.nodes) != cells:
            break
        host = structs.replace(host, domains=(*host.domains, domain_of_plan(plan(host, request))))
        placed += 1
    assert placed == _vmcap(free, cells)


def test_a_share_leaves_a_core_for_each_emulator_and_one_for_the_host() -> None:
    host = shipped("hgx-h100")
    vcpus, memory_bytes = share_of(host, 2)
    assert (vcpus, memory_bytes % GIB) == (24, 0)
    assert 4 * (vcpus // 2 + 1) < 56


def test_flavours_are_read_from_toml() -> None:
    text = """
format = 1
[[flavour]]
name = "a"
gpus = 2
gpu_model = "h100"
[[flavour]]
name = "b"
vcpus = 8
memory = "16GiB"
value = 3
"""
    first, second = parse_flavours(text, "f.toml")
    assert (first.gpus, first.options.vcpus, first.worth) == (2, None, 2)
    assert (second.gpus, second.options.memory_bytes, second.worth) == (0, 16 * GIB, 3)


@pytest.mark.parametrize(
    ("line", "key"),
    [
        ("gpu = 1", "gpu"),
        ("vcpus = 0", "vcpus"),
        ("vcpus = true", "vcpus"),
        ("memory = 512", "memory"),
        ('memory = "0GiB"', "memory"),
        ('page_size = "3KiB"', "page_size"),
        ('layout = "none"', "layout"),
        ('gpu_model = "\\u001b[2J"', "gpu_model"),
        ('gpu_model = " "', "gpu_model"),
        ("value = -1", "value"),
    ],
)
def test_a_refused_flavour_names_its_key(line: str, key: str) -> None:
    text = f'format = 1\n[[flavour]]\nname = "a"\ngpus = 1\n{line}\n'
    with pytest.raises(InputError, match=rf"^f\.toml: flavour\[0\]\.{key}: expected"):
        parse_flavours(text, "f.toml")


def test_a_flavour_that_takes_nothing_of_a_host_is_refused() -> None:
    text = 'format = 1\n[[flavour]]\nname = "a"\nvcpus = 2\nmemory = "1GiB"\nlayout = "default"\n'
    with pytest.raises(InputError, match=r"^f\.toml: flavour\[0\]\.layout: expected a layout that"):
        parse_flavours(text, "f.toml")
    assert parse_flavours(text + "gpus = 1\n", "f.toml")[0].gpus == 1


def test_a_flavour_of_another_model_fits_nowhere() -> None:
    flavour = sized(name="b200", gpus=1, gpu_model="B200")
    own = sized(name="h100", gpus=1, gpu_model="h100")
    found = outlook(pool_of([("a", shipped("hgx-h100"))]), [flavour, own])
    assert [fit.local for fit in found.fits] == [0, 8]


def test_a_gpu_on_a_node_that_the_source_does_not_list_is_stranded_for_want_of_a_node() -> None:
    """An lspci text names the nodes of devices, and has no nodes."""
    host = structs.replace(shipped("hgx-h100"), nodes=(), cores=(), pus=(), distances=None)
    found = outlook(pool_of([("a", host)]), default_flavours())
    assert [(one.missing, one.gpus) for one in found.stranded] == [("gpu-node", 8)]
