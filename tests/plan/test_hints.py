"""What a refusal says first, and that whoever follows its hints gets a plan."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from msgspec.structs import replace

import homenode
from homenode.machine.topology import Host
from homenode.plan.planner import plan
from homenode.plan.request import GuestRequest
from homenode.plan.search.place import place
from homenode.units import GIB
from homenode.vm.plan import Unplannable
from homenode.vm.sources import load_host
from tests.figures import numbers
from tests.seeds import THOROUGH, part
from tests.small_hosts import NodeSpec, asking, even_host, host_of, small_request

HOSTS = sorted((Path(homenode.__file__).parent / "machine/hosts").glob("*.toml"))
XEON = load_host("h200-xeon8558")


def refusal(host: Host, request: GuestRequest) -> Unplannable:
    with pytest.raises(Unplannable) as refused:
        place(host, request)
    return refused.value


def smt(vcpus: int, *, keep: bool = False) -> GuestRequest:
    return replace(small_request(vcpus, layout="pin-numa-smt"), keep_vcpus=keep)


@pytest.mark.parametrize(("vcpus", "offer"), [(193, "192"), (200, "192"), (301, "192")])
def test_kept_vcpus_beyond_the_host_are_lowered_to_all_its_pus(vcpus: int, offer: str) -> None:
    hint = refusal(XEON, smt(vcpus, keep=True)).hint
    assert hint is not None
    assert numbers(hint) == [int(offer)]


def test_memory_comes_before_cores_that_fewer_siblings_lack() -> None:
    request = asking(smt(16, keep=True), memory_bytes=900 * GIB)
    error = refusal(even_host(2, 1, 1, 4, 2), request)
    assert 900 in numbers(error.message)


def test_a_host_of_one_node_says_each_refusal_once_and_what_to_lower() -> None:
    error = refusal(even_host(1, 1, 1, 4, 2), asking(small_request(88), memory_bytes=900 * GIB))
    assert len({one.constraint for one in error.rejections}) == len(error.rejections)
    assert error.hint == "--vcpus 8 and less memory"


def test_a_limit_of_nodes_names_how_many_would_do() -> None:
    host = even_host(4, 1, 1, 4, 1)
    error = refusal(host, asking(small_request(12), max_nodes=2))
    assert "--max-nodes 3" in (error.hint or "")
    assert "3 nodes needed, 2 allowed" in error.message
    uneven = host_of([NodeSpec(((1,) * 5,)), NodeSpec(((1,) * 3,), package=1)])
    error = refusal(uneven, asking(small_request(8), max_nodes=1))
    assert "--max-nodes 2" in (error.hint or "")


def followed(request: GuestRequest, hint: str) -> Iterator[GuestRequest]:
    """The requests that a hint speaks of."""
    for offer in hint.split(", or "):
        options = dict(re.findall(r"--(vcpus|memory|max-nodes) (\d+)", offer))
        size = GIB if "less memory" in offer else int(options.get("memory", 0)) * GIB
        if options:
            yield asking(
                request,
                vcpus=int(options.get("vcpus", request.vcpus)),
                memory_bytes=size or request.memory_bytes,
                max_nodes=int(options.get("max-nodes", 0)) or request.options.max_nodes,
            )


@pytest.mark.parametrize("path", part(HOSTS, 1, every=9), ids=lambda path: path.stem)
def test_whoever_follows_a_hint_gets_a_plan(path: Path) -> None:
    host = load_host(str(path))
    cores, pus = len(host.cores), sum(pu.online for pu in host.pus)
    memory = max((node.memory_bytes or 0 for node in host.nodes), default=0) // GIB * GIB
    tried = 0
    limits = ((None, 2 * GIB), (1, 2 * GIB), (None, memory + 8 * GIB))
    for vcpus in {cores - 2, cores - 1, cores, cores + 1, pus - 3, pus, pus + 1} - {0, -1}:
        for layout, keep in (
            ("pin", False),
            ("pin-numa", False),
            ("pin-numa-smt", False),
            ("pin-numa-smt", True),
        ):
            # But on small hosts each limit is tried at some of the numbers.
            for most_nodes, size in limits if pus < 16 or THOROUGH else limits[vcpus % 2 :: 2]:
                request = asking(
                    small_request(vcpus, size, layout=layout), keep_vcpus=keep, max_nodes=most_nodes
                )
                try:
                    place(host, request)
                    continue
                except Unplannable as error:
                    hints = {error.hint, *(r.hint for r in error.rejections)} - {None}
                wishes = {wish for hint in hints if hint for wish in followed(request, hint)}
                for wish in wishes:
                    plan(host, wish)
                    tried += 1
    assert tried
