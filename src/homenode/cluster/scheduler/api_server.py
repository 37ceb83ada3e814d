"""API server: the objects of a Kubernetes cluster, listed and then watched. [I/O]

Source: Kubernetes documentation, "Kubernetes API Concepts": list with limit and continue, watch
from its resourceVersion, 410 = list again.
"""

import http.client
import json
import os
import ssl
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlencode, urlsplit

from msgspec import Struct

from homenode.errors import HomenodeError, HostError, UsageError
from homenode.input_files import read_file

ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
_TIMEOUT_S = 30
_WATCH_S = 300
_QUIET_S = 120
"""Of a watch; bookmarks come every minute: a connection that is dead is noticed."""

_PAGE = 500
_MOST_TOKEN_BYTES = 64 << 10
_MOST_PAGE_BYTES = 256 << 20
_MOST_LINE_BYTES = 4 << 20
_FIRST_WAIT_S, _LONGEST_WAIT_S = 0.5, 30.0

Change = Callable[[str, Mapping[str, Any]], None]
"""Called with ADDED, MODIFIED or DELETED and the object; SYNCED and the UIDs when all are listed;
FAILED and the reason."""


class ApiServer(Struct, frozen=True, kw_only=True):
    """Where it is, and who asks. token: a file that is read each time, since tokens expire."""

    host: str
    port: int
    token: Path
    context: ssl.SSLContext

    def lines(self, path: str, query: Mapping[str, str], timeout_s: float) -> Iterator[bytes]:
        """The lines of an answer. Raises HostError."""
        connection = http.client.HTTPSConnection(
            self.host, self.port, timeout=timeout_s, context=self.context
        )
        try:
            token = read_file(self.token, "a token", most=_MOST_TOKEN_BYTES).decode("ascii").strip()
            if not token.isprintable():  # the library's own message would show it
                raise HostError(f"{self.token}: expected a token of one line, found another text")
            headers = {
                "Authorization": f"Bearer {token}",
                "Accept": "application/json",
                "User-Agent": "homenode",
            }
            connection.request("GET", f"{path}?{urlencode(query)}", headers=headers)
            answer = connection.getresponse()
            if answer.status != http.client.OK:
                raise _Refused(path, answer.status)
            most = _MOST_LINE_BYTES if "watch" in query else _MOST_PAGE_BYTES
            while line := answer.readline(most + 1):
                if len(line) > most:
                    raise HostError(f"{path}: expected at most {most} bytes, found more")
                yield line
        except (OSError, http.client.HTTPException, UnicodeError) as error:
            raise HostError(f"API server {self.host}: expected an answer, found: {error}") from None
        finally:
            connection.close()


class _Refused(HostError):
    def __init__(self, path: str, status: int) -> None:
        super().__init__(
            f"{path}: expected status 200, found {status}",
            hint="packaging/kubernetes has the roles that it needs" if status == 403 else None,
        )
        self.status = status


def api_server(url: str | None, token: Path | None, authority: Path | None) -> ApiServer:
    """Of a URL, else the one of the cluster that this pod runs in. Raises UsageError, HostError."""
    if url is None:
        host = os.environ.get("KUBERNETES_SERVICE_HOST")
        if host is None:
            raise UsageError(
                "expected --api-server URL, found none, and no KUBERNETES_SERVICE_HOST",
                hint="outside a pod: --api-server https://HOST:6443 --api-token FILE --api-ca FILE",
            )
        port = os.environ.get("KUBERNETES_SERVICE_PORT", "443")
        url = f"https://[{host}]:{port}" if ":" in host else f"https://{host}:{port}"
    parts = urlsplit(url)
    if parts.scheme != "https" or not parts.hostname or parts.path not in ("", "/"):
        raise UsageError(f"--api-server: expected https://HOST:PORT, found {url!r}")
    try:
        context = ssl.create_default_context(cafile=str(authority or ACCOUNT / "ca.crt"))
    except (OSError, ssl.SSLError) as error:
        raise HostError(f"--api-ca: expected certificates, found: {error}") from None
    return ApiServer(
        host=parts.hostname,
        port=parts.port or 443,
        token=token or ACCOUNT / "token",
        context=context,
    )


def follow(api: ApiServer, path: str, query: Mapping[str, str], change: Change) -> None:
    """List the objects, then pass on each change, and list again where the watch ends. Returns
    where the server does not have the kind; else never. `change` may be called from here only."""
    wait_s = _FIRST_WAIT_S
    while True:
        try:
            version = _list(api, path, query, change)
            wait_s = _FIRST_WAIT_S
            while True:
                version = _watch(api, path, query, version, change)
                time.sleep(_FIRST_WAIT_S)  # a proxy may end each at once
        except (HomenodeError, AttributeError, TypeError, ValueError) as error:
            if isinstance(error, _Refused) and error.status == http.client.NOT_FOUND:
                change("SYNCED", {"uids": frozenset()})
                return
            if not (isinstance(error, _Refused) and error.status == http.client.GONE):
                change("FAILED", {"reason": str(error)})
            time.sleep(wait_s)
            wait_s = min(2 * wait_s, _LONGEST_WAIT_S)


def _list(api: ApiServer, path: str, query: Mapping[str, str], change: Change) -> str:
    uids: set[str] = set()
    more = ""
    while True:
        page = {**query, "limit": str(_PAGE), **({"continue": more} if more else {})}
        found = _object(b"".join(api.lines(path, page, _TIMEOUT_S)), path)
        for item in found.get("items") or ():
            uids.add(str(item.get("metadata", {}).get("uid")))
            change("ADDED", item)
        meta = found.get("metadata") or {}
        more = str(meta.get("continue") or "")
        if not more:
            change("SYNCED", {"uids": frozenset(uids)})
            return str(meta.get("resourceVersion", ""))


def _watch(
    api: ApiServer, path: str, query: Mapping[str, str], version: str, change: Change
) -> str:
    """Until the server ends it, after some minutes."""
    watch = {
        **query,
        "watch": "1",
        "resourceVersion": version,
        "allowWatchBookmarks": "true",
        "timeoutSeconds": str(_WATCH_S),
    }
    for line in api.lines(path, watch, _QUIET_S):
        event = _object(line, path)
        kind, item = event.get("type"), event.get("object") or {}
        if kind == "ERROR":
            raise _Refused(path, int(item.get("code") or 0))
        version = str(item.get("metadata", {}).get("resourceVersion") or version)
        if kind in ("ADDED", "MODIFIED", "DELETED"):
            change(str(kind), item)
    return version


def _object(content: bytes, path: str) -> dict[str, Any]:
    try:
        found = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise HostError(f"{path}: expected JSON, found: {error}") from None
    if not isinstance(found, dict):
        raise HostError(f"{path}: expected an object, found {type(found).__name__}")
    return found
