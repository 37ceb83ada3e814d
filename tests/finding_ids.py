"""Ids of findings, doubts and rejections as the source gives them."""

import ast
from collections.abc import Collection, Iterator
from pathlib import Path

from tests.source_trees import FILES, SOURCE, nodes

ANY = frozenset({"Finding"})


def ids_given(path: Path, callables: Collection[str] = ANY) -> Iterator[str]:
    """Texts given as the first argument, or as `id` or `constraint`, to these callables.

    Of a condition at the call both texts.
    """
    for node in nodes(path):
        if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Name)):
            continue
        if node.func.id not in callables:
            continue
        named = [word.value for word in node.keywords if word.arg in ("id", "constraint")]
        for value in named or node.args[:1]:
            either = (value.body, value.orelse) if isinstance(value, ast.IfExp) else (value,)
            for one in either:
                if isinstance(one, ast.Constant) and isinstance(one.value, str):
                    yield one.value


_MAKERS: tuple[tuple[str, dict[str, str]], ...] = (
    ("", {"Finding": "", "PlanFinding": "", "Broken": ""}),
    ("verify/document", {"differs": "plan-"}),
    ("verify/guest", {"check": "guest-", "_groups": "guest-"}),
    ("kubevirt", {"_refused": ""}),
)
"""Folders, the functions there that make findings of an id, and what they put before it."""


def all_ids() -> frozenset[str]:
    """Ids that the source gives to findings, as texts."""
    return frozenset(
        prefix + one
        for folder, makers in _MAKERS
        for path in (SOURCE / folder).rglob("*.py")
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
    """(id, severity) of each Finding whose id is a text, for every severity that stands there."""
    for node in nodes(path):
        if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Name)):
            continue
        if node.func.id != "Finding":
            continue
        words = {word.arg: word.value for word in node.keywords}
        name, severity = words.get("id"), words.get("severity")
        if isinstance(name, ast.Constant) and severity is not None:
            for part in ast.walk(severity):
                if isinstance(part, ast.Attribute) and part.attr.isupper():
                    yield str(name.value), part.attr.lower()
