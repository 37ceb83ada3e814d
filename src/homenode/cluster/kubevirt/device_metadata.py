"""DeviceMetadata: what a DRA driver says of the devices that a pod's claims were given.

Files are {base}/resourceclaims/CLAIM/REQUEST/DRIVER-metadata.json, and the same below
resourceclaimtemplates. They say a function's NUMA node where the firmware does not.

Source: KEP-5304; Kubernetes 1.36, k8s.io/dynamic-resource-allocation/devicemetadata; KubeVirt 1.9,
pkg/dra/metadata (metadata.resource.k8s.io/v1alpha1).
"""

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

from homenode.bdf import Bdf
from homenode.cluster.pods.objects import MAX_BYTES, down
from homenode.errors import ParseError
from homenode.machine.snapshot.protocol import Snapshot

BASE = "/var/run/kubernetes.io/dra-device-attributes"
_FOLDERS = ("resourceclaims", "resourceclaimtemplates")
_SUFFIX = "-metadata.json"
_MOST_FILES = 256
_PREFIX = "resource.kubernetes.io/"
_SPACE = re.compile(r"[ \t\r\n]*")
_NOTHING: Mapping[str, Any] = {}


def claimed_nodes(snapshot: Snapshot) -> dict[Bdf, int]:
    """The NUMA node of each function for which a claim's metadata has one. A file that cannot be
    read says nothing: it only helps where sysfs is silent."""
    found: dict[Bdf, int] = {}
    for number, path in enumerate(_files(snapshot)):
        text = snapshot.read_text(path) if number < _MOST_FILES else None
        if text is None:
            continue
        objects = (one for one in _objects(text) if isinstance(one.get("requests"), list))
        for request in next(objects, _NOTHING).get("requests", ()):
            for device in _list(down(request, "devices")):
                attributes = down(device, "attributes")
                node = down(attributes, f"{_PREFIX}numaNode", "int")
                name = down(attributes, f"{_PREFIX}pciBusID", "string")
                if isinstance(name, str) and type(node) is int and node >= 0:
                    try:
                        found[Bdf.parse(name)] = node
                    except ParseError:
                        continue
    return found


def _objects(text: str) -> Iterator[Mapping[str, Any]]:
    """A file has the same data in each version that its driver writes, one object after another."""
    decoder, at = json.JSONDecoder(), 0
    while len(text) <= MAX_BYTES and (start := _SPACE.match(text, at)):
        try:
            value, at = decoder.raw_decode(text, start.end())
        except (ValueError, RecursionError):
            return
        if isinstance(value, dict):
            yield value


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _files(snapshot: Snapshot) -> Iterator[str]:
    for kind in _FOLDERS:
        for claim in snapshot.list(f"{BASE}/{kind}") or ():
            for request in snapshot.list(f"{BASE}/{kind}/{claim}") or ():
                folder = f"{BASE}/{kind}/{claim}/{request}"
                for name in snapshot.list(folder) or ():
                    if name.endswith(_SUFFIX):
                        yield f"{folder}/{name}"
