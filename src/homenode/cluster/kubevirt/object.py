"""Object: reads and writes Kubernetes objects in kubectl's formats.

Aliases are rejected: with them a small file can expand to more than fits into memory.

Quantities: sizes and counts as Kubernetes spells them. Source:
k8s.io/apimachinery/pkg/api/resource, Quantity.
"""

import json
import re
from collections import Counter
from collections.abc import Mapping
from decimal import Decimal
from typing import Any

import yaml
from msgspec import Struct

from homenode.cluster.arguments import NATIVE_GATE, NATIVE_SINCE, parse_version
from homenode.errors import InputError, ParseError
from homenode.text import command_line, plural

MAX_BYTES = 4 << 20
"""Size limit of an object's file; etcd accepts objects of 1.5 MiB."""


def read_object(text: str | bytes, source: str, subject: str) -> Mapping[str, Any]:
    """Return a JSON object of a text. Raises InputError."""
    if len(text) > MAX_BYTES:
        raise InputError(f"{source}: expected at most {MAX_BYTES} bytes, found {len(text)}")
    try:
        document = json.loads(text)
    except (ValueError, RecursionError) as error:  # no JSON, no UTF-8, or nested without end
        raise InputError(
            f"{source}: expected {subject} as JSON, found: {error}",
            hint="kubectl prints JSON with -o json",
        ) from None
    if not isinstance(document, dict):
        raise InputError(
            f"{source}: expected {subject}, an object, found {type(document).__name__}",
            hint="kubectl prints JSON with -o json",
        )
    return document


def find_value(value: Any, *path: str) -> Any:
    """Return the value at a path of names in nested objects; None if it is not there."""
    for name in path:
        value = value.get(name) if isinstance(value, Mapping) else None
    return value


_MAX_DEPTH = 64
_MAX_NUMBER = 64
_MAX_NODES = 20_000
"""Limit of YAML nodes in a file, of 10 microseconds and 300 bytes each; a VMI has 500."""


class _Loader(yaml.SafeLoader):  # type: ignore[misc]  # it has no types
    """Values as Kubernetes has them: no aliases, no dates, bounded depth and number."""

    depth = nodes = 0

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        if self.check_event(yaml.AliasEvent):
            raise yaml.YAMLError("found an alias; write the value out")
        if self.peek_event().tag is not None:
            raise yaml.YAMLError("found a tag, which Kubernetes does not accept")
        self.depth += 1
        self.nodes += 1
        if self.depth > _MAX_DEPTH or self.nodes > _MAX_NODES:
            raise yaml.YAMLError(f"found more than {_MAX_DEPTH} levels or {_MAX_NODES} values")
        node: yaml.Node | None = super().compose_node(parent, index)
        self.depth -= 1
        return node

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode)]
        if repeated_keys := [key for key, count in Counter(keys).items() if count > 1]:
            raise yaml.YAMLError(f"found the key {str(repeated_keys[0])[:40]!r} twice")
        mapping: dict[Any, Any] = super().construct_mapping(node, deep)
        return mapping

    def resolve(self, kind: type[yaml.Node], value: str | None, implicit: Any) -> str:
        """Return the type of a value. A long value is a text: 1:1:1 in base 60 takes minutes."""
        if value is not None and len(value) > _MAX_NUMBER:
            implicit = (False, implicit[1])
        tag: str = super().resolve(kind, value, implicit)
        return tag


_Loader.yaml_implicit_resolvers = {
    letter: [(tag, pattern) for tag, pattern in resolvers if not tag.endswith(":timestamp")]
    for letter, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}


def read_manifest(text: bytes, source: str, subject: str) -> Mapping[str, Any]:
    """Return the single object of a file. Raises InputError."""
    if len(text) > MAX_BYTES:
        raise InputError(f"{source}: expected at most {MAX_BYTES} bytes, found {len(text)}")
    try:
        if text.lstrip().startswith(b"<"):
            raise InputError(
                f"{source}: expected {subject} as YAML or JSON, found XML",
                hint=command_line("homenode", "doctor", source),
            )
        documents = _parse_documents(text)
    except UnicodeDecodeError:
        raise InputError(f"{source}: expected {subject} in UTF-8, found other bytes") from None
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        mark = getattr(error, "problem_mark", None)
        first = str(getattr(error, "problem", None) or error).replace("\n", " ")[:200]
        first += "" if mark is None else f" (line {mark.line + 1})"
        raise InputError(f"{source}: expected {subject} as YAML or JSON, found: {first}") from None
    if (
        len(documents) == 1
        and isinstance(documents[0], dict)
        and str(documents[0].get("kind")).endswith("List")
    ):
        items = documents[0].get("items")
        documents = items if isinstance(items, list) else []
    if len(documents) != 1 or not isinstance(documents[0], dict):
        raise InputError(
            f"{source}: expected {subject}, one object, found "
            f"{'a text' if len(documents) == 1 else plural(len(documents), 'object')}",
            hint="name the object: kubectl get KIND NAME -o yaml",
        )
    return documents[0]


def _parse_documents(text: bytes) -> list[Any]:
    try:
        return [json.loads(text)]  # may have tabs, which YAML does not take
    except (ValueError, RecursionError):
        loader = _Loader(text.decode("utf-8"))
    documents = []
    while loader.check_data():
        document = loader.get_data()
        if document is not None:
            documents.append(document)
    return documents


class _Readable(yaml.SafeDumper):  # type: ignore[misc]  # it has no types
    """Writes texts of several lines in block style, and repeated objects without aliases."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _quote_text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    """Quote a text that another version of YAML might read as a number or boolean: 1e3, y."""
    style = None
    if not text.replace("\n", "").replace("\t", "").isprintable():
        style = '"'  # escaped: \x85 ends a line elsewhere
    elif "\n" in text:
        style = "|"
    elif len(text) < 2 or not (text[0].isalpha() or text[0] == "/"):
        style = "'"
    node: yaml.ScalarNode = dumper.represent_scalar("tag:yaml.org,2002:str", text, style)
    return node


_Readable.add_representer(str, _quote_text)


def format_yaml(*documents: Mapping[str, Any]) -> str:
    """Documents with "---" between them. Values are strings, numbers, booleans, lists and mappings.

    >>> print(format_yaml({"all": [{"state": "on", "count": 1}], "more": {}}), end="")
    all:
    - state: 'on'
      count: 1
    more: {}
    """
    text: str = yaml.dump_all(
        documents,
        Dumper=_Readable,
        sort_keys=False,
        allow_unicode=True,
        width=80,
    )
    return text


_ON_SINCE = {"GPUsWithDRA": (1, 9), "HostDevicesWithDRA": (1, 9)}
"""Gates that are on from a version on."""


class Cluster(Struct, frozen=True):
    """Version and gates of a KubeVirt object."""

    gates: frozenset[str]  # that are on, and known to the version
    version: tuple[int, int] | None = None
    # PCI ids ("10DE:2330"; "" if none) by resource name; None: no permittedHostDevices
    permitted: Mapping[str, str] | None = None
    ignores_native: bool = False  # it names the gate, which its version does not have

    @property
    def has_native(self) -> bool:
        """Whether KubeVirt itself gives the devices their nodes."""
        return NATIVE_GATE in self.gates


def read_cluster(text: bytes, source: str) -> Cluster:
    """Return the version and gates of a KubeVirt object, as YAML or JSON. Raises InputError."""
    cr = read_manifest(text, source, "a KubeVirt object")
    if cr.get("kind") != "KubeVirt":
        raise InputError(
            f"{source}: expected one object of kind KubeVirt, found {cr.get('kind')!r}",
            hint="kubectl get kubevirt -A -o yaml > kubevirt.yaml",
        )
    version = parse_version(find_value(cr, "status", "observedKubeVirtVersion"))
    developer = find_value(cr, "spec", "configuration", "developerConfiguration")
    gates = list_texts(find_value(developer, "featureGates"))
    off = list_texts(find_value(developer, "disabledFeatureGates"))
    gates |= {gate for gate, since in _ON_SINCE.items() if version and version >= since} - off
    unknown = {NATIVE_GATE} if version and version < NATIVE_SINCE else set()
    device_lists = find_value(cr, "spec", "configuration", "permittedHostDevices")
    kinds = device_lists.values() if isinstance(device_lists, dict) else ()
    devices = [device for kind in kinds if isinstance(kind, list) for device in kind]
    permitted = {
        str(find_value(device, "resourceName")): str(find_value(device, "pciVendorSelector") or "")
        for device in devices
    }
    return Cluster(
        gates - unknown, version, None if device_lists is None else permitted, bool(gates & unknown)
    )


def list_texts(value: object) -> frozenset[str]:
    """Return the texts of a list; none if it is not a list."""
    items = value if isinstance(value, list) else []
    return frozenset(text for text in items if isinstance(text, str))


_QUANTITY = re.compile(
    r"(\d{1,18}(?:\.\d{1,9})?)(?:([eE])([+-]?\d{1,2})|([a-zA-Z]{0,2}))\Z", re.ASCII
)
_FACTOR = {
    "": Decimal(1),
    "n": Decimal("1e-9"),
    "u": Decimal("1e-6"),
    "m": Decimal("1e-3"),
    **{name: Decimal(1000) ** power for power, name in enumerate("kMGTPE", start=1)},
    **{f"{name}i": Decimal(1024) ** power for power, name in enumerate("KMGTPE", start=1)},
}


def parse_quantity(value: Any, source: str) -> int:
    """The whole number of a quantity, rounded up and capped as Kubernetes does. Raises ParseError.

    >>> parse_quantity("64Gi", "memory") >> 30, parse_quantity("1500m", "cpu")
    (64, 2)
    """
    text = str(value).strip()
    match = _QUANTITY.match(text)
    if match is None or (match[4] or "") not in _FACTOR:
        raise ParseError(source, "a quantity of 0 or more, such as 64Gi or 8", text)
    number = Decimal(match[1])
    number *= Decimal(10) ** int(match[3]) if match[2] else _FACTOR[match[4] or ""]
    return min(int(number.to_integral_value(rounding="ROUND_CEILING")), 2**63 - 1)


def format_quantity(count: int) -> str:
    """Return the quantity with the largest unit that needs no fraction.

    >>> format_quantity(3 << 30), format_quantity(1537 << 20)
    ('3Gi', '1537Mi')
    """
    units = ("", "Ki", "Mi", "Gi")
    power = max(power for power in range(4) if count % 1024**power == 0)
    return f"{count // 1024**power}{units[power]}"
