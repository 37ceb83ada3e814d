"""The extender as it runs, in front of a stub of the API server: what callers and that one may do
to it. Of each node the judge is kubelet's own model in test_extender."""

import json
import os
import resource
import signal
import socket
import ssl
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from http.client import HTTPException, HTTPSConnection
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

from homenode.cluster.pool.model import Pool
from homenode.cluster.scheduler.nodes import ClusterNodes
from homenode.cluster.scheduler.serve import ListenAddress, SchedulerService
from tests.scheduler.kube_cluster import free_port, make_certificates, until
from tests.scheduler.kube_stream import CONFIG, pod

TOKEN, SECRET = "of-callers-0123456789", "of-the-cluster-0123456789"
NODES = [f"hgx-h100-{number}" for number in (1, 2)]


class Serving:
    """The process, its stub and its log. says: status and body of each answer of the stub to a
    list; None = as it should be."""

    def __init__(self, folder: Path) -> None:
        pytest.importorskip("tornado", reason="tornado is not installed")
        self.folder, self.port = folder, free_port()
        self.says: tuple[int, bytes] | None = None
        make_certificates(folder)
        self.context = ssl.create_default_context(cafile=str(folder / "ca.crt"))
        self.api = self._stub()
        (folder / "callers").write_text(TOKEN)
        (folder / "token").write_text(SECRET)
        settings = folder / "configz"
        settings.mkdir()
        (settings / f"{NODES[0]}.json").write_text(json.dumps(CONFIG))
        self.process = subprocess.Popen(
            [
                *(sys.executable, "-m", "homenode", "pool", "serve", "--pool", "hgx-h100*2"),
                *("--kubelet", settings, "--listen", f"127.0.0.1:{self.port}"),
                *("--cert", folder / "server.crt", "--key", folder / "server.key"),
                *("--token-file", folder / "callers", "--api-token", folder / "token"),
                *("--api-server", f"https://127.0.0.1:{self.api.server_port}"),
                *("--api-ca", folder / "ca.crt"),
            ],
            stderr=(folder / "log").open("wb"),
            preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (96, 96)),
        )
        until("homenode pool serve", lambda: self.ask("GET", "/healthz")[0] == 200)

    def _stub(self) -> ThreadingHTTPServer:
        serving = self

        class Stub(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                if "watch=1" in self.path and serving.is_well():
                    self.send_response(200)
                    self.end_headers()
                    while serving.is_well():
                        time.sleep(0.05)
                    return
                status, content = serving.says or (200, b'{"items": [], "metadata": {}}')
                self.send_response(status)
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

            def log_message(self, *_: object) -> None:
                pass

        api = ThreadingHTTPServer(("127.0.0.1", 0), Stub)
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        context.load_cert_chain(self.folder / "server.crt", self.folder / "server.key")
        api.socket = context.wrap_socket(api.socket, server_side=True)
        api.daemon_threads = True
        Thread(target=api.serve_forever, daemon=True).start()
        return api

    def is_well(self) -> bool:
        return self.says is None

    def ask(self, method: str, path: str, body: bytes = b"") -> tuple[int, bytes]:
        connection = HTTPSConnection("127.0.0.1", self.port, timeout=8, context=self.context)
        try:
            headers = {"Authorization": f"Bearer {TOKEN}"}
            connection.request(method, path, body, headers)
            found = connection.getresponse()
            return found.status, found.read()
        except (OSError, HTTPException):
            return 0, b""
        finally:
            connection.close()

    def filter(self, name: str, nodes: list[str]) -> tuple[int, Any]:
        document = pod(name, 8) | {"metadata": {"name": name, "uid": name}}
        asked = {"Pod": document, "NodeNames": nodes}
        status, content = self.ask("POST", "/filter", json.dumps(asked).encode())
        return status, json.loads(content) if status == 200 else content

    def log(self) -> str:
        return (self.folder / "log").read_text()

    def end(self) -> None:
        self.process.kill()
        self.process.wait()
        self.says = 500, b""
        self.api.shutdown()


@pytest.fixture
def serving(tmp_path: Path) -> Iterator[Serving]:
    found = Serving(tmp_path)
    yield found
    found.end()


def has_status(status: int, serving: Serving) -> Callable[[], bool]:
    return lambda: serving.ask("GET", "/healthz")[0] == status


def test_what_was_made_anew_stays_where_the_old_one_of_its_name_goes() -> None:
    nodes = ClusterNodes(Pool(shapes=(), hosts=()), {}, (), {}, {})
    service = SchedulerService(nodes)
    spec = {"driver": "d", "pool": {"name": "p"}, "devices": [{"name": "g"}]}
    for kind in ("slices", "claims"):
        for uid in "12":
            item = {"metadata": {"uid": uid, "namespace": "n", "name": "c"}, "spec": spec}
            service.change(kind, "ADDED", item)
        service.change(kind, "SYNCED", {"uids": {"2"}})
    assert [*service.nodes.devices] == [("d", "p", "g")]
    assert [*service.nodes.allocations] == ["n/c"]
    service.change("claims", "SYNCED", {"uids": set()})
    service.change("slices", "SYNCED", {"uids": set()})
    assert not service.nodes.devices and not service.nodes.allocations


def test_a_certificate_whose_key_is_not_there_yet_leaves_the_one_from_before(
    tmp_path: Path,
) -> None:
    for name in ("old", "new"):
        (tmp_path / name).mkdir()
        make_certificates(tmp_path / name)
    certificate, key = tmp_path / "old/server.crt", tmp_path / "old/server.key"
    here = ListenAddress(
        address="", port=0, certificate=certificate, key=key, client_authority=None, token=None
    )
    context, notes = here.context(), list[str]()
    assert context is not None
    certificate.write_bytes((tmp_path / "new/server.crt").read_bytes())
    here.renew(context, notes.append)
    ours, theirs = socket.socketpair()
    client = ssl._create_unverified_context()

    def shake() -> None:
        with client.wrap_socket(theirs):
            pass

    thread = Thread(target=shake)
    thread.start()
    context.wrap_socket(ours, server_side=True).close()
    thread.join()
    assert len(notes) == 1


def test_it_answers_whatever_callers_and_the_api_server_do(serving: Serving) -> None:
    # A node whose kubelet's settings are not known counts as one without a capture.
    assert serving.filter("a", NODES) == (200, {"NodeNames": NODES, "FailedNodes": {}})
    assert serving.ask("HEAD", "/filter") == (404, b"")
    assert serving.filter("b", ["\ud800"])[0] == 400
    # More connections than files are refused, and those before them stay.
    asked = [socket.create_connection(("127.0.0.1", serving.port)) for _ in range(120)]
    time.sleep(0.3)
    # Who says nothing, or may not ask, has no place for long; who may has it for two minutes.
    until("silent callers have lost their places", has_status(200, serving), 20)
    assert [one.recv(1) for one in asked[:40]] == [b""] * 40
    known = [HTTPSConnection("127.0.0.1", serving.port, context=serving.context) for _ in range(2)]
    for one, token in zip(known, (TOKEN, "wrong"), strict=True):
        one.connect()
        one.auto_open = 0
        one.request("GET", "/metrics", headers={"Authorization": f"Bearer {token}"})
        assert one.getresponse().read()
    time.sleep(6)
    known[0].request("GET", "/metrics", headers={"Authorization": f"Bearer {TOKEN}"})
    assert known[0].getresponse().status == 200
    assert known[1].sock.recv(1) == b""
    assert "Traceback" not in serving.log()
    # What was known is of yesterday once the API server refuses.
    serving.says = 401, b"{}"
    until("it is refused", has_status(503, serving))
    assert serving.filter("c", NODES)[0] == 503
    (serving.folder / "token").write_text(f"{SECRET}\n{SECRET}")
    until("it has read the token", lambda: b"one line" in serving.ask("GET", "/healthz")[1])
    assert SECRET.encode() not in serving.ask("GET", "/healthz")[1]
    (serving.folder / "token").write_text(SECRET)
    serving.says = None
    until("it is back", has_status(200, serving))
    # Who is being answered at the end is answered.
    serving.filter("d", NODES)
    answers: list[int] = []
    waiting = Thread(target=lambda: answers.append(serving.filter("e", NODES)[0]))
    waiting.start()
    time.sleep(0.5)
    os.kill(serving.process.pid, signal.SIGTERM)
    waiting.join()
    assert answers == [200]
    assert serving.process.wait(10) == 0
    assert TOKEN not in serving.log() and SECRET not in serving.log()
