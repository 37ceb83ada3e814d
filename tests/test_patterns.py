"""Every regular expression is linear: who writes what we read cannot make us wait for ever.

Steps are counted over inputs that are made of each pattern's own parts, and must not grow faster
than the input does.
"""

import ast
import importlib
import pkgutil
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

import homenode
from tests.pattern_steps import Matcher, superlinear

SOURCE = Path(homenode.__file__).parent
METHODS = {
    "match": "match",
    "fullmatch": "fullmatch",
    "search": "search",
    "finditer": "everywhere",
    "findall": "everywhere",
    "sub": "everywhere",
    "subn": "everywhere",
    "split": "everywhere",
}
LINEAR = 2.6
"""Twice the input is twice the steps, and a little; four times of what is quadratic."""

PASSED_ON = {
    ("snapshot/redacted_domain.py", "fullmatch"),
    ("tools/openssl_speed.py", "fullmatch"),
    ("snapshot/contents.py", "fullmatch"),
}
"""Files that hand patterns over, and the method that is called with them."""

Case = tuple[str, Any, str]


def _uses(path: Path) -> dict[str, set[str]]:
    """Methods of re.Pattern that a file calls, by the name that they are called of."""
    found: dict[str, set[str]] = {}
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Attribute) and node.attr in METHODS:
            name = node.value.id if isinstance(node.value, ast.Name) else ast.unparse(node.value)
            found.setdefault(name, set()).add(METHODS[node.attr])
    return found


def _owned(value: Any, name: str) -> Iterator[tuple[str, Any]]:
    """Patterns in a value: itself, in containers, in records and classes."""
    if isinstance(value, re.Pattern):
        yield name, value
    elif isinstance(value, Mapping):
        for one in (*value.keys(), *value.values()):
            yield from _owned(one, f"{name}[]")
    elif isinstance(value, tuple | list | set | frozenset):
        for one in value:
            yield from _owned(one, f"{name}[]")
    elif isinstance(value, type) and value.__module__.startswith("homenode"):
        for key, one in vars(value).items():
            if isinstance(one, re.Pattern | tuple | list):
                yield from _owned(one, f"{name}.{key}")
    elif type(value).__module__.startswith("homenode"):
        for key in getattr(value, "__dataclass_fields__", ()):
            yield from _owned(getattr(value, key), f"{name}.{key}")


def _named() -> Iterator[Case]:
    seen: set[tuple[int, str]] = set()
    for module in pkgutil.walk_packages([str(SOURCE)], "homenode."):
        loaded = importlib.import_module(module.name)
        path = Path(str(loaded.__file__))
        inside = str(path.relative_to(SOURCE))
        uses = _uses(path)
        for top, value in list(vars(loaded).items()):
            for name, pattern in _owned(value, top):
                methods = uses.get(name, set())
                if not methods:
                    methods = {method for file, method in PASSED_ON if file == inside}
                for method in sorted(methods or {"search"}):
                    if (id(pattern), method) not in seen:
                        seen.add((id(pattern), method))
                        yield f"{inside}:{name}.{method}", pattern, method


def _in_line() -> Iterator[Case]:
    for path in sorted(SOURCE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
                continue
            of_re = isinstance(node.func.value, ast.Name) and node.func.value.id == "re"
            text = node.args[0] if node.args else None
            if of_re and node.func.attr in METHODS and isinstance(text, ast.Constant):
                where = f"{path.relative_to(SOURCE)}:{node.lineno}"
                yield where, re.compile(text.value), METHODS[node.func.attr]


CASES = (*_named(), *_in_line())


def test_all_patterns_are_looked_at() -> None:
    assert len(CASES) > 280


@pytest.mark.parametrize(("name", "pattern", "method"), CASES, ids=[case[0] for case in CASES])
def test_steps_grow_no_faster_than_the_text(name: str, pattern: Any, method: str) -> None:
    assert superlinear(Matcher(pattern), method, LINEAR) is None, pattern.pattern


@pytest.mark.parametrize(
    ("pattern", "method"),
    [
        (r"=+ ?(.*?) ?=+", "fullmatch"),
        (r"(a+)+\Z", "match"),
        (r"(?:a|aa)*b", "match"),
        (r"\s+\Z", "search"),
        (r"\w+\+", "everywhere"),
        (r"(\S+).*x", "match"),
        (r"(?:x[^;]*;)*y", "search"),
        (rb"(?:[ \t]*<!--[^\r\n]*?-->)+[ \t]*(?=[\r\n]|\Z)", "match"),
    ],
)
def test_a_pattern_that_is_not_linear_is_found(pattern: str, method: str) -> None:
    assert superlinear(Matcher(re.compile(pattern)), method, LINEAR) is not None


@pytest.mark.parametrize(
    ("pattern", "method", "text"),
    [
        (r"a*b|c(d|e)+?f", "match", "cdedf"),
        (r"(?<!\s)\s+x", "search", "  \n x"),
        (r"(\w)-\1", "fullmatch", "a-a"),
        (r"(?:ab)*+c", "match", "ababc"),
        (r"\b[^a-y\d]{2,3}$", "search", "9 zz"),
        (r"(?i:A)B(?=c)", "match", "abC"),
    ],
)
def test_the_counting_matcher_finds_what_python_finds(pattern: str, method: str, text: str) -> None:
    """Otherwise its steps would be of something else."""
    for flags in (0, re.IGNORECASE):
        compiled = re.compile(pattern, flags)
        for tried in (text, text + "\n", text[:-1], "x" + text):
            found = getattr(compiled, method)(tried) is not None
            assert Matcher(compiled).finds(method, tried) == found, (pattern, tried)
