"""YamlText: objects as YAML that people can edit: block style, and quotes only where needed.

Kubernetes takes JSON as well, but a VM that somebody is to fill in should not be one.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

_PLAIN = re.compile(r"[A-Za-z/][A-Za-z0-9 _./@-]*(?::[A-Za-z0-9_./-]+)*\Z", re.ASCII)
_SHORT = {'"': '\\"', "\\": "\\\\", "\n": "\\n", "\t": "\\t"}
_WORDS = frozenset({"true", "false", "yes", "no", "on", "off", "null", "y", "n"})


def yaml_text(*documents: Mapping[str, Any]) -> str:
    """Documents with "---" between them. Values are texts, numbers, truths, lists and mappings.

    >>> print(yaml_text({"a": [{"b": "on", "c": 1}], "d": {}}), end="")
    a:
    - b: "on"
      c: 1
    d: {}
    """
    return "---\n".join("".join(f"{line}\n" for line in _mapping(d, "")) for d in documents)


def _mapping(value: Mapping[str, Any], indent: str) -> Iterator[str]:
    for key, inner in value.items():
        yield from _entry(f"{indent}{_scalar(key)}:", inner, indent)


def _entry(head: str, value: Any, indent: str) -> Iterator[str]:
    if isinstance(value, Mapping) and value:
        yield head
        yield from _mapping(value, f"{indent}  ")
    elif isinstance(value, list | tuple) and value:
        yield head
        yield from _sequence(value, indent)
    elif isinstance(value, str) and _is_block(value):
        yield f"{head} |"
        yield from (f"{indent}  {line}" if line else "" for line in value[:-1].split("\n"))
    else:
        yield f"{head} {_scalar(value)}"


def _is_block(value: str) -> bool:
    """Whether a text of lines is the same in block style, which ends with the last of them."""
    bare = value.removesuffix("\n")
    return (
        "" != bare != value
        and bare == bare.strip()
        and all(letter.isprintable() or letter in "\n\t" for letter in value)
    )


def _sequence(value: Sequence[Any], indent: str) -> Iterator[str]:
    for item in value:
        if isinstance(item, Mapping) and item:
            lines = list(_mapping(item, f"{indent}  "))
            yield f"{indent}- {lines[0][len(indent) + 2 :]}"
            yield from lines[1:]
        else:
            yield from _entry(f"{indent}-", item, indent)


def _scalar(value: Any) -> str:
    if not isinstance(value, str):
        return json.dumps(value)
    if _PLAIN.match(value) and value == value.rstrip() and value.lower() not in _WORDS:
        return value
    if '"' in value and value.isprintable():
        return "'" + value.replace("'", "''") + "'"
    return '"' + "".join(map(_escaped, value)) + '"'


def _escaped(letter: str) -> str:
    """Within double quotes. Not as JSON has it: YAML knows no pairs of surrogates."""
    if letter in _SHORT:
        return _SHORT[letter]
    number = ord(letter)
    if letter.isprintable():
        return letter
    return f"\\u{number:04x}" if number < 1 << 16 else f"\\U{number:08x}"
