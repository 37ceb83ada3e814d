"""Syntax trees of the source, parsed once for all tests of a process that walk them."""

import ast
import gc
from functools import cache
from pathlib import Path

SOURCE = Path(__file__).parents[1] / "src" / "homenode"
FILES = sorted(SOURCE.rglob("*.py"))


@cache
def tree(path: Path) -> ast.Module:
    """The tree of one file. No collection of garbage looks through 800,000 nodes that all stay."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        return ast.parse(path.read_text(encoding="utf-8"))
    finally:
        gc.freeze()
        if was_enabled:
            gc.enable()


@cache
def nodes(path: Path) -> tuple[ast.AST, ...]:
    return tuple(ast.walk(tree(path)))
