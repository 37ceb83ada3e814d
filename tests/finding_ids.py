"""Ids of findings, caveats and rejections as the source gives them."""

import ast
from collections.abc import Collection, Iterator
from itertools import product
from pathlib import Path

from tests.source_trees import FILES, SOURCE, nodes

ANY = frozenset({"Finding", "finding"})


def ids_given(path: Path, callables: Collection[str] = ANY) -> Iterator[str]:
    """Texts given as the first argument, or as `id` or `constraint`, to these callables.

    Of a condition at the call both texts.
    """
    for call in calls(path, callables):
        yield from ids_of(call)


def calls(path: Path, callables: Collection[str]) -> Iterator[ast.Call]:
    """Calls of these names."""
    for node in nodes(path):
        if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Name)):
            continue
        if node.func.id in callables:
            yield node


def ids_of(call: ast.Call) -> Iterator[str]:
    """The texts that may be the id of a call."""
    named = [word.value for word in call.keywords if word.arg in ("id", "constraint")]
    for value in named or call.args[:1]:
        either = (value.body, value.orelse) if isinstance(value, ast.IfExp) else (value,)
        for one in either:
            if isinstance(one, ast.Constant) and isinstance(one.value, str):
                yield one.value


_MAKERS: tuple[tuple[str, dict[str, str]], ...] = (
    ("", dict.fromkeys((*ANY, "_broken", "_usage_finding"), "")),
    ("check/verify/guest", {"check": "guest-", "_groups": "guest-"}),
    ("cluster/kubevirt", {"_refused": ""}),
)
"""Directories, the functions there that make findings of an id, and what they put before it."""


def all_ids() -> frozenset[str]:
    """Ids that the source gives to findings, as texts."""
    return frozenset(
        prefix + one
        for directory, makers in _MAKERS
        for path in (SOURCE / directory).rglob("*.py")
        for name, prefix in makers.items()
        for one in ids_given(path, {name})
    )


def words_of_source() -> frozenset[str]:
    """Every text of the source that may be an id, with each prefix that one may get."""
    found = set()
    for path in FILES:
        for node in nodes(path):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                found |= {node.value, f"plan-{node.value}", f"guest-{node.value}"}
                found |= {f"{node.value}-missing"} if node.value.startswith("live-") else set()
                found |= {f"nccl-{node.value}-twice", f"target-{node.value}"}
    return frozenset(found)


def severities_given(path: Path) -> Iterator[tuple[str, str]]:
    """(id, severity) of each finding whose id is a text, for every severity that stands there."""
    for call in calls(path, ANY):
        for word in call.keywords:
            if word.arg == "severity":
                names, severities = tuple(ids_of(call)), tuple(_severities(word.value))
                if _condition(call) == _condition(word.value) is not None:
                    yield from zip(names, severities, strict=True)
                else:
                    yield from product(names, severities)


def _severities(value: ast.expr) -> Iterator[str]:
    either = (value.body, value.orelse) if isinstance(value, ast.IfExp) else (value,)
    for one in either:
        if isinstance(one, ast.Attribute) and one.attr.isupper():
            yield one.attr.lower()
        elif isinstance(one, ast.Constant) and isinstance(one.value, str):
            yield one.value


def _condition(value: ast.expr) -> str | None:
    """What a severity, or the id of a call, depends on."""
    if isinstance(value, ast.Call):
        named = [word.value for word in value.keywords if word.arg == "id"]
        value = (named or value.args)[0]
    return ast.dump(value.test) if isinstance(value, ast.IfExp) else None
