"""Objects: what kubectl prints with -o json, read within limits."""

import json
from collections.abc import Mapping
from typing import Any

from homenode.errors import InputError

MAX_BYTES = 4 << 20
"""Of an object; etcd takes 1.5 MiB of one."""


def read_object(text: str | bytes, source: str, what: str) -> Mapping[str, Any]:
    """A JSON object of a text. Raises InputError."""
    if len(text) > MAX_BYTES:
        raise InputError(f"{source}: expected at most {MAX_BYTES} bytes, found {len(text)}")
    try:
        document = json.loads(text)
    except (ValueError, RecursionError) as error:  # no JSON, no UTF-8, or nested without end
        raise InputError(
            f"{source}: expected {what} as JSON, found: {error}",
            hint="kubectl prints JSON with -o json",
        ) from None
    if not isinstance(document, dict):
        raise InputError(
            f"{source}: expected {what}, an object, found {type(document).__name__}",
            hint="kubectl prints JSON with -o json",
        )
    return document


def down(value: Any, *path: str) -> Any:
    """What is down a path of names in nested objects; None where it is not there."""
    for name in path:
        value = value.get(name) if isinstance(value, Mapping) else None
    return value
