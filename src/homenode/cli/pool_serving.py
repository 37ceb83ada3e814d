"""homenode pool serve: a pool as kube-scheduler's extender. [I/O]"""

import gc
import ipaddress
from collections.abc import Iterator
from pathlib import Path

from msgspec.structs import replace

from homenode.bdf import Bdf
from homenode.cli.arguments.pool import PoolServeArguments
from homenode.cli.pods import kubelet_of, named_devices, of_node
from homenode.cli.pool_reading import note_failures, pool_named, progress, read_flavours
from homenode.cli.terminal import note
from homenode.cluster.pods.kubelet import Kubelet
from homenode.cluster.pool.model import Pool
from homenode.cluster.pool.outlook import outlook
from homenode.cluster.pool.sources import load_pool
from homenode.cluster.scheduler.api_server import api_server
from homenode.cluster.scheduler.nodes import ClusterNodes
from homenode.cluster.scheduler.serve import ListenAddress
from homenode.cluster.scheduler.serve import serve as serve_nodes
from homenode.errors import HomenodeError, UsageError
from homenode.input_files import read_input


def serve(asked: PoolServeArguments) -> None:
    """Answer until a signal ends it."""
    sources, endpoint = pool_named(asked.pool, asked.sources), _endpoint(asked)
    api = api_server(asked.api_server, asked.api_token, asked.api_ca)
    flavours, named = read_flavours(asked.flavours), named_devices(asked.device)
    ids = {} if asked.device_ids is None else dict(_ids(asked.device_ids))
    with progress("reading hosts") as show_progress:
        pool = load_pool(sources, show_progress, reserved=False)
    note_failures(pool)
    kubelets = _kubelets(pool, asked.kubelet)
    pool = replace(pool, hosts=tuple(one for one in pool.hosts if one.name in kubelets))
    nodes = ClusterNodes(pool, kubelets, flavours, ids, named)
    with progress("planning") as show_progress:
        outlook(nodes.places.pool(), flavours, nodes.places.planner, show_progress)
    gc.freeze()  # what is kept until the end is not looked through again at requests
    serve_nodes(nodes, api, endpoint, note)


def _kubelets(pool: Pool, given: Path | None) -> dict[str, Kubelet]:
    found = {}
    for one in pool.hosts:
        try:
            found[one.name] = kubelet_of(pool.host(one), of_node(given, f"{one.name}.json"))
        except HomenodeError as error:
            note(f"left out {one.name}: {error.message}")
    return found


def _endpoint(asked: PoolServeArguments) -> ListenAddress:
    """Raises UsageError for an address that others reach without TLS, or without proof of who
    calls."""
    address, _, port = asked.listen.rpartition(":")
    address = address.removeprefix("[").removesuffix("]")
    try:
        is_local = ipaddress.ip_address(address).is_loopback
    except ValueError:
        is_local = None
    if is_local is None or not port.isdecimal() or not 0 < int(port) < 1 << 16:
        raise UsageError(f"--listen: expected ADDRESS:PORT, found {asked.listen!r}")
    if (asked.cert is None) != (asked.key is None):
        raise UsageError("expected --cert and --key together, found one of them")
    if asked.client_ca is not None and asked.cert is None:
        raise UsageError("--client-ca: expected --cert and --key with it, found none")
    is_guarded = asked.cert is not None and (asked.client_ca or asked.token_file) is not None
    if not is_local and not is_guarded:
        raise UsageError(
            f"--listen {asked.listen}: expected --cert, --key and one of --client-ca and "
            "--token-file for an address that other machines reach, found fewer",
            hint="without them only 127.0.0.1 is possible",
        )
    token = None
    if asked.token_file is not None:
        content = read_input(asked.token_file, "a token").decode("ascii", "replace")
        token = content.strip()
        if len(token) < 16 or not token.isprintable():
            raise UsageError(f"{asked.token_file}: expected a token of 16 or more characters")
    return ListenAddress(
        address=address,
        port=int(port),
        certificate=asked.cert,
        key=asked.key,
        client_authority=asked.client_ca,
        token=token,
    )


def _ids(path: Path) -> Iterator[tuple[str, str]]:
    """Name and address of each device. Raises InputError, UsageError."""
    text = read_input(path, "names and addresses of devices").decode("utf-8", "replace")
    for number, line in enumerate(text.splitlines(), start=1):
        if not line.strip():
            continue
        name, comma, address = line.partition(",")
        if not comma:
            raise UsageError(f"{path}:{number}: expected NAME, ADDRESS, found {line[:80]!r}")
        yield name.strip(), str(Bdf.parse(address.strip(), f"{path}:{number}"))
