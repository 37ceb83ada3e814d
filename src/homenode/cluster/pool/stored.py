"""Stored pools: a file of lines: a head, each shape, each host. Read line by line."""

from collections.abc import Iterator

from msgspec import Struct

from homenode import formats
from homenode.cluster.pool.model import Pool, PoolBuilder, PoolFailure, PoolHost
from homenode.errors import InputError
from homenode.machine.topology import Host

POOL_FILE = "pool.jsonl"


class PoolHead(Struct, omit_defaults=True, frozen=True):
    """The first line. shapes, hosts: how many lines of each follow."""

    shapes: int
    hosts: int


class PoolLine(Struct, omit_defaults=True, frozen=True, kw_only=True):
    """A line: one of the three."""

    shape: Host | None = None
    host: PoolHost | None = None
    failure: PoolFailure | None = None


def encode_pool(pool: Pool) -> Iterator[str]:
    """The lines of a pool."""
    yield formats.head_line("pool-hosts", PoolHead(len(pool.shapes), len(pool.hosts)))
    for shape in pool.shapes:
        yield formats.line(PoolLine(shape=shape))
    for host in pool.hosts:
        yield formats.line(PoolLine(host=host))
    for failure in pool.failures:
        yield formats.line(PoolLine(failure=failure))


def read_pool(content: bytes, source: str, builder: PoolBuilder) -> None:
    """Add the hosts of a stored pool. Raises InputError that names the line."""
    end = content.find(b"\n") + 1
    head = formats.decode_head(content[:end], "pool-hosts", PoolHead, source)
    decoded = formats.plain_line_decoder(PoolLine)
    numbers: list[int] = []
    hosts = 0
    number = 1
    while end < len(content):
        number += 1
        begin, end = end, content.find(b"\n", end) + 1 or len(content)
        line = decoded(content[begin:end])
        if line is None:
            raise InputError(
                f"{source}:{number}: expected a line of homenode.pool-hosts, found another"
            )
        if line.shape is not None:
            numbers.append(builder.shape(line.shape))
        elif line.host is not None:
            one = line.host
            if not 0 <= one.shape < len(numbers) or len(one.nodes) != len(
                builder.shape_nodes(numbers[one.shape])
            ):
                raise InputError(f"{source}:{number}: expected a shape that is above, found none")
            hosts += 1
            builder.add_known(
                PoolHost(
                    name=one.name,
                    shape=numbers[one.shape],
                    nodes=one.nodes,
                    domains=one.domains,
                    source=one.source,
                    fault_domain=one.fault_domain,
                    lists_domains=one.lists_domains,
                )
            )
        elif line.failure is not None:
            builder.fail(line.failure.source, line.failure.reason)
    if hosts != head.hosts:
        raise InputError(
            f"{source}: expected {head.hosts} hosts, found {hosts}: the file was cut short"
        )
