"""Ids of findings, doubts and rejections as the source gives them."""

import ast
from collections.abc import Collection, Iterator
from pathlib import Path

ANY = frozenset({"Finding"})


def ids_given(path: Path, callables: Collection[str] = ANY) -> Iterator[str]:
    """Texts given as the first argument, or as `id` or `constraint`, to these callables.

    Of a condition at the call both texts.
    """
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
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
