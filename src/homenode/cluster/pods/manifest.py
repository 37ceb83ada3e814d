"""Manifest: an object of Kubernetes as kubectl takes and prints it, YAML or JSON.

Aliases are refused: with them a small file can stand for more than fits into memory.
"""

from collections.abc import Mapping
from typing import Any

import yaml  # type: ignore[import-untyped]

from homenode.cluster.pods.objects import MAX_BYTES
from homenode.errors import InputError

_MAX_DEPTH = 64


class _Loader(yaml.SafeLoader):  # type: ignore[misc]
    """Values as Kubernetes has them: no aliases, no dates, bounded depth."""

    depth = 0

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        if self.check_event(yaml.AliasEvent):
            raise yaml.YAMLError("found an alias; write the value out")
        self.depth += 1
        if self.depth > _MAX_DEPTH:
            raise yaml.YAMLError(f"found more than {_MAX_DEPTH} levels")
        node: yaml.Node | None = super().compose_node(parent, index)
        self.depth -= 1
        return node


_Loader.yaml_implicit_resolvers = {
    letter: [(tag, pattern) for tag, pattern in resolvers if not tag.endswith(":timestamp")]
    for letter, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}


def read_manifest(text: bytes, source: str, what: str) -> Mapping[str, Any]:
    """The one object of a file that is no list. Raises InputError."""
    if len(text) > MAX_BYTES:
        raise InputError(f"{source}: expected at most {MAX_BYTES} bytes, found {len(text)}")
    try:
        loader = _Loader(text.decode("utf-8"))
        found = []
        while loader.check_data():
            document = loader.get_data()
            if document is not None:
                found.append(document)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        first = str(error).replace("\n", " ")[:200]
        raise InputError(f"{source}: expected {what} as YAML or JSON, found: {first}") from None
    if len(found) == 1 and isinstance(found[0], dict) and found[0].get("kind") == "List":
        items = found[0].get("items")
        found = items if isinstance(items, list) else []
    if len(found) != 1 or not isinstance(found[0], dict):
        raise InputError(
            f"{source}: expected {what}, one object, found {len(found)} documents",
            hint="name the object: kubectl get KIND NAME -o yaml",
        )
    return found[0]
