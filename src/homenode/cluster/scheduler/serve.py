"""Serve: the HTTP server that kube-scheduler calls, and the watches behind it. [I/O]

All that it knows comes from the captures and the API server: a restart loses nothing. The scheduler
asks for the next pod while it still binds the one before. So an answer waits until the API server
says what has become of the pods that were answered for: bound, refused or deleted.
"""

import asyncio
import hmac
import resource
import signal
import ssl
import time
from base64 import b64decode
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping
from http import HTTPStatus
from pathlib import Path
from threading import Thread
from typing import Any, NamedTuple

from msgspec import Struct, json

from homenode import __version__
from homenode.check.metrics import Gauge, Sample, exposition
from homenode.cluster.kubevirt.object import down
from homenode.cluster.pool.solver import optional_module
from homenode.cluster.scheduler.api_server import ApiServer, follow
from homenode.cluster.scheduler.claims import allocated, read_slice
from homenode.cluster.scheduler.extender import (
    ExtenderRequest,
    filter_nodes,
    prioritize,
    read_request,
)
from homenode.cluster.scheduler.nodes import ClusterNodes, read_bound_pod
from homenode.errors import HomenodeError, HostError

MOST_BODY_BYTES = 8 << 20
_MOST_HEADER_BYTES = 16 << 10
_BODY_TIMEOUT_S = 10
_IDLE_TIMEOUT_S = 120
_MOST_CONNECTIONS = 512
_LOOKS, _LOOK_S = 20, 0.25
"""As often it is looked whether a new connection is of a caller that may ask, before it is closed.
Looks, not seconds: while a request is answered, others cannot be heard."""

_RENEWED_S = 60.0
"""How often the certificate is read again."""

_SETTLED_S = 2.0
"""The longest wait for the API server to say what has become of a pod."""

_RUNNING = "status.phase!=Succeeded,status.phase!=Failed"
_KINDS: tuple[tuple[str, str, dict[str, str]], ...] = (
    ("pods", "/api/v1/pods", {"fieldSelector": _RUNNING}),
    ("claims", "/apis/resource.k8s.io/v1/resourceclaims", {}),
    ("slices", "/apis/resource.k8s.io/v1/resourceslices", {}),
)
_COUNTED = {
    "nodes_refused": "Candidates whose kubelet would refuse.",
    "nodes_unknown": "Candidates without a capture.",
    "pods_unsettled": "Pods of which nothing was heard in time.",
    "pods_unreadable": "Pods that could not be read: they do not count.",
    "requests_malformed": "Requests that could not be read.",
}


class ListenAddress(Struct, frozen=True, kw_only=True):
    """Where it listens. certificate, key: None = plain HTTP. client_authority: of certificates that
    callers may show. token: that they may send."""

    address: str
    port: int
    certificate: Path | None
    key: Path | None
    client_authority: Path | None
    token: str | None

    def context(self) -> ssl.SSLContext | None:
        """Raises HostError for files that are no certificates."""
        if self.certificate is None:
            return None
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        try:
            context.load_cert_chain(self.certificate, self.key)
            if self.client_authority is not None:
                context.load_verify_locations(self.client_authority)
                context.verify_mode = ssl.CERT_OPTIONAL  # /healthz asks for none
        except (OSError, ssl.SSLError) as error:
            raise HostError(f"{self.certificate}: expected certificates, found: {error}") from None
        return context

    def renew(self, context: ssl.SSLContext | None, note: Callable[[str], None]) -> None:
        """Show the certificate that is in its files by now."""
        if context is not None and self.certificate is not None:
            try:
                self.context()  # a key of another certificate would leave none in the old one
                context.load_cert_chain(self.certificate, self.key)
            except (OSError, ssl.SSLError, HostError) as error:
                note(f"{self.certificate}: the certificate from before stays: {error}")

    def admits(self, authorization: str, has_certificate: bool) -> bool:
        """Whether a caller is known. kube-scheduler sends a token as the password of its URL."""
        if self.client_authority is None and self.token is None:
            return True
        if self.client_authority is not None and has_certificate:
            return True
        kind, _, value = authorization.partition(" ")
        if kind == "Basic":
            try:
                value = b64decode(value, validate=True).decode().partition(":")[2]
            except ValueError:
                return False
        elif kind != "Bearer":
            return False
        return self.token is not None and hmac.compare_digest(value.encode(), self.token.encode())


class Reply(NamedTuple):
    """What is sent back."""

    status: int
    content: bytes
    kind: str = "application/json"


def _text(status: int, text: str) -> Reply:
    return Reply(status, f"{text}\n".encode(), "text/plain; charset=utf-8")


class SchedulerService:
    """The extender's answers over HTTP. It is used by one thread only, that of the event loop."""

    def __init__(self, nodes: ClusterNodes) -> None:
        self.nodes = nodes
        self._claims: dict[str, Mapping[str, Any]] = {}
        self._names: dict[tuple[str, str], Any] = {}
        self._unsynced = {kind for kind, _, _ in _KINDS}
        self._failed: dict[str, str] = {}
        self._unsettled: dict[str, float] = {}
        self._settled = asyncio.Event()
        self._counts: Counter[tuple[str, str]] = Counter()
        self._seconds: defaultdict[str, float] = defaultdict(float)

    # What the API server says

    def change(self, kind: str, event: str, item: Mapping[str, Any]) -> None:
        """An object was added, modified or deleted; all are listed; or the watch has failed."""
        if event == "FAILED":
            self._failed[kind] = str(item["reason"])
            return
        self._failed.pop(kind, None)
        if event == "SYNCED":
            self._unsynced.discard(kind)
            for known in [uid for of, uid in self._names if of == kind and uid not in item["uids"]]:
                self._forget(kind, known)
            return
        uid = str(down(item, "metadata", "uid"))
        if event == "DELETED":
            self._forget(kind, uid)
        elif kind == "pods":
            self._put_pod(uid, item)
        elif kind == "claims":
            name = f"{down(item, 'metadata', 'namespace')}/{down(item, 'metadata', 'name')}"
            self._names[kind, uid] = name
            self._claims[name] = item
            self.nodes.allocations[name] = allocated(item)
            self.nodes.forget_states()
        else:
            self._forget(kind, uid)
            devices = {one.key: one for one in read_slice(item)}
            self._names[kind, uid] = devices
            self.nodes.devices.update(devices)
            self.nodes.forget_states()

    def _put_pod(self, uid: str, item: Mapping[str, Any]) -> None:
        try:
            found = read_bound_pod(item)
        except (HomenodeError, AttributeError, TypeError, ValueError):
            self._counts["pods_unreadable", ""] += 1
            return
        if found is None:
            self._forget("pods", uid)
            return
        self._names["pods", uid] = uid
        self.nodes.put(found)
        if found.node in self.nodes.pool and not self._unsynced:
            self.nodes.state(found.node)  # before others come or go
        if found.node is not None or found.is_refused:
            self._settle(uid)

    def _forget(self, kind: str, uid: str) -> None:
        known = self._names.pop((kind, uid), None)
        if kind == "pods":
            self.nodes.remove(uid)
            self._settle(uid)
        elif known is not None and kind == "claims":
            if down(self._claims, known, "metadata", "uid") == uid:  # else made anew
                del self._claims[known], self.nodes.allocations[known]
            self.nodes.forget_states()
        elif known is not None:
            for key, device in known.items():
                if self.nodes.devices.get(key) is device:  # else another slice has it by now
                    del self.nodes.devices[key]
            self.nodes.forget_states()

    def _settle(self, uid: str) -> None:
        if self._unsettled.pop(uid, None) is not None:
            self._settled.set()
            self._settled = asyncio.Event()

    async def _all_settled(self, uid: str) -> None:
        """Until the API server has said where each earlier pod went, or too long has passed."""
        self._unsettled.pop(uid, None)
        while self._unsettled:
            left_s = min(self._unsettled.values()) - time.monotonic()
            if left_s <= 0:
                self._counts["pods_unsettled", ""] += 1
                self._unsettled = {
                    one: end for one, end in self._unsettled.items() if end > time.monotonic()
                }
                continue
            try:
                await asyncio.wait_for(self._settled.wait(), left_s)
            except TimeoutError:
                continue

    # What the scheduler asks

    async def reply(self, method: str, path: str, body: bytes) -> Reply:
        """The answer to a caller that may ask."""
        verb = path.rpartition("/")[2]
        if (method, verb) == ("GET", "metrics"):
            return Reply(200, self.metrics().encode(), "text/plain; version=0.0.4; charset=utf-8")
        if method != "POST" or verb not in ("filter", "prioritize"):
            return _text(404, "expected POST filter or prioritize, GET healthz or metrics")
        if (health := self.health()).status != 200:
            return health  # what it knew may be of yesterday
        try:
            request = read_request(body)
        except HomenodeError as error:
            self._counts["requests_malformed", ""] += 1
            return _text(400, str(error))
        if verb == "filter":
            await self._all_settled(request.pod.uid)
        start = time.perf_counter()
        answer = self._filter(request) if verb == "filter" else self._prioritize(request)
        self._seconds[verb] += time.perf_counter() - start
        self._counts["answered", verb] += 1
        return Reply(200, json.encode(answer))

    def _filter(self, request: ExtenderRequest) -> Any:
        found = filter_nodes(self.nodes, request)
        self._counts["nodes_unknown", ""] += found.unknown
        self._counts["nodes_refused", ""] += len(found.refused)
        if found.nodes:
            self._unsettled[request.pod.uid] = time.monotonic() + _SETTLED_S
        return found.document()

    def _prioritize(self, request: ExtenderRequest) -> Any:
        claims = [self._claims[name] for name in request.pod.claims if name in self._claims]
        return prioritize(self.nodes, request, claims)

    def health(self) -> Reply:
        """200 once all objects are listed and watched."""
        if self._unsynced:
            return _text(503, f"not listed yet: {', '.join(sorted(self._unsynced))}")
        if self._failed:
            return _text(503, "; ".join(f"{kind}: {why}" for kind, why in self._failed.items()))
        return _text(200, "ok")

    def metrics(self) -> str:
        """Prometheus' text format."""
        return exposition(
            Gauge(
                f"homenode_extender_{name}",
                about,
                value if isinstance(value, list) else [({}, value)],
                "counter" if name.endswith("_total") else "gauge",
            )
            for name, about, value in self._values()
        )

    def _values(self) -> Iterator[tuple[str, str, float | list[Sample]]]:
        verbs = sorted(self._seconds)
        yield (
            "requests_total",
            "Requests that were answered.",
            [({"verb": verb}, self._counts["answered", verb]) for verb in verbs],
        )
        yield (
            "seconds_total",
            "Time that the answers took, without waiting.",
            [({"verb": verb}, self._seconds[verb]) for verb in verbs],
        )
        yield "nodes", "Nodes with a capture.", len(self.nodes.pool)
        yield "pods", "Pods that count.", self.nodes.pods
        estimated = sum(self.nodes.estimated.values())
        yield "pods_estimated", "Pods whose devices the API server does not say.", estimated
        for name, about in _COUNTED.items():
            yield f"{name}_total", about, self._counts[name, ""]
        yield "watches_failed", "Kinds that cannot be watched now.", len(self._failed)


def serve(
    nodes: ClusterNodes, api: ApiServer, endpoint: ListenAddress, note: Callable[[str], None]
) -> None:
    """Answer until SIGTERM or SIGINT; ``note`` takes the line that says where. Raises UsageError
    without the library, HostError where it cannot listen."""
    server_module = optional_module("tornado.httpserver", "pool serve", "tornado")
    context = endpoint.context()

    async def run() -> None:
        loop, service, stop = asyncio.get_running_loop(), SchedulerService(nodes), asyncio.Event()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, stop.set)
        tasks: set[asyncio.Task[None]] = set()

        def receive(request: Any) -> None:
            task = loop.create_task(_respond(service, endpoint, request))
            tasks.add(task)
            task.add_done_callback(tasks.discard)

        server = _limited(server_module.HTTPServer)(
            receive,
            ssl_options=context,
            max_body_size=MOST_BODY_BYTES,
            max_header_size=_MOST_HEADER_BYTES,
            body_timeout=_BODY_TIMEOUT_S,
            idle_connection_timeout=_IDLE_TIMEOUT_S,
        )
        try:
            server.listen(endpoint.port, endpoint.address)
        except OSError as error:
            raise HostError(f"--listen {endpoint.address}: {error}") from None
        for kind, path, query in _KINDS:
            _watch_in_thread(loop, service, api, kind, path, query)
        scheme = "http" if context is None else "https"
        note(f"listening on {scheme}://{endpoint.address}:{endpoint.port}")
        is_stopped = loop.create_task(stop.wait())
        while not (await asyncio.wait({is_stopped}, timeout=_RENEWED_S))[0]:
            endpoint.renew(context, note)
        server.stop()
        if tasks:  # the scheduler would ask again for those that are cut off
            await asyncio.wait(tasks, timeout=2 * _SETTLED_S)
        await server.close_all_connections()

    asyncio.run(run())


def _limited(server: Any) -> Any:
    """A class of servers that take only so many connections at once: files are finite, and one that
    cannot be opened is asked for again and again."""
    most = min(_MOST_CONNECTIONS, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 2)

    class Limited(server):  # type: ignore[misc]  # its library is optional
        def handle_stream(self, stream: Any, address: Any) -> None:
            self.taken = getattr(self, "taken", 0)
            if self.taken >= most:
                stream.close()
                return
            self.taken += 1
            _close_unknown(stream, _LOOKS)
            super().handle_stream(stream, address)

        def on_close(self, connection: Any) -> None:
            self.taken -= 1
            super().on_close(connection)

    return Limited


def _close_unknown(stream: Any, looks: int) -> None:
    if getattr(stream, "is_known", False) or stream.closed():
        return
    if not looks:
        stream.close()
        return
    asyncio.get_running_loop().call_later(_LOOK_S, _close_unknown, stream, looks - 1)


def _watch_in_thread(
    loop: asyncio.AbstractEventLoop,
    service: SchedulerService,
    api: ApiServer,
    kind: str,
    path: str,
    query: Mapping[str, str],
) -> None:
    def change(event: str, item: Mapping[str, Any]) -> None:
        loop.call_soon_threadsafe(service.change, kind, event, item)

    Thread(target=follow, args=(api, path, query, change), name=kind, daemon=True).start()


async def _respond(service: SchedulerService, endpoint: ListenAddress, request: Any) -> None:
    from tornado.httputil import HTTPHeaders, ResponseStartLine
    from tornado.iostream import StreamClosedError

    if request.method == "GET" and request.path == "/healthz":
        reply = service.health()
    elif not endpoint.admits(
        request.headers.get("Authorization", ""),
        endpoint.client_authority is not None and bool(request.get_ssl_certificate()),
    ):
        reply = _text(401, "expected a client certificate or a token")
    else:
        request.connection.stream.is_known = True
        reply = await service.reply(request.method, request.path, request.body)
    headers = HTTPHeaders(
        {
            "Content-Type": reply.kind,
            "Content-Length": str(len(reply.content)),
            "Server": f"homenode/{__version__}",
            "X-Content-Type-Options": "nosniff",
        }
    )
    start = ResponseStartLine("HTTP/1.1", reply.status, HTTPStatus(reply.status).phrase)
    content = b"" if request.method == "HEAD" else reply.content
    try:
        await request.connection.write_headers(start, headers, content)
        request.connection.finish()
    except StreamClosedError:
        pass
