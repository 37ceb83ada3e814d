"""Every regular expression is linear: who writes what we read cannot make us wait for ever.

Each is tried with long inputs that are made of its own parts.
"""

import ast
import fnmatch
import importlib
import pkgutil
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from homenode.machine.snapshot.contents import TextForm
from homenode.machine.snapshot.pseudonyms import _PLACE_OF_HOST
from homenode.vm.targets.registry import TARGETS, find_target
from tests.slow_texts import slow_text
from tests.source_trees import FILES, SOURCE, nodes

METHODS = {
    "match": "match",
    "fullmatch": "fullmatch",
    "search": "search",
    "finditer": "finditer",
    "findall": "finditer",
    "sub": "finditer",
    "subn": "finditer",
    "split": "finditer",
}
PASSED_ON = {
    "machine/snapshot/redact.py": "fullmatch",
    "measure/importers/intel_mlc.py": "fullmatch",
    "machine/tools/nccl_tests.py": "fullmatch",
    "machine/tools/nvbandwidth.py": "fullmatch",
    "machine/tools/rocm_bandwidth_test.py": "fullmatch",
    "machine/tools/study_programs.py": "fullmatch",
    "cluster/slurm/scontrol.py:_LINES[]": "fullmatch",
    "machine/snapshot/contents.py": "fullmatch",
}
"""Files, or names in them, that hand patterns over, and the method that is called with them."""

Case = tuple[str, Any, str]


def _methods(path: Path) -> dict[str, set[str]]:
    """Methods of re.Pattern that a file calls, by the name that they are called of."""
    found: dict[str, set[str]] = {}
    for node in nodes(path):
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
        for key in (
            *getattr(value, "__dataclass_fields__", ()),
            *getattr(value, "__struct_fields__", ()),
        ):
            yield from _owned(getattr(value, key), f"{name}.{key}")


def _named() -> Iterator[Case]:
    seen: set[tuple[int, str]] = set()
    for module in pkgutil.walk_packages([str(SOURCE)], "homenode."):
        loaded = importlib.import_module(module.name)
        path = Path(str(loaded.__file__))
        inside = str(path.relative_to(SOURCE))
        uses = _methods(path)
        for top, value in list(vars(loaded).items()):
            for name, pattern in _owned(value, top):
                methods = uses.get(name, set())
                passed_on = PASSED_ON.get(f"{inside}:{name}", PASSED_ON.get(inside, "search"))
                for method in sorted(methods or {passed_on}):
                    if (id(pattern), method) not in seen:
                        seen.add((id(pattern), method))
                        yield f"{inside}:{name}.{method}", pattern, method


def _in_line() -> Iterator[Case]:
    for path in FILES:
        for node in nodes(path):
            if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
                continue
            of_re = isinstance(node.func.value, ast.Name) and node.func.value.id == "re"
            text = node.args[0] if node.args else None
            if of_re and node.func.attr in METHODS and isinstance(text, ast.Constant):
                where = f"{path.relative_to(SOURCE)}:{node.lineno}"
                yield where, re.compile(text.value), METHODS[node.func.attr]


BUILT: dict[tuple[str, str], tuple[str, str]] = {
    ("machine/snapshot/contents.py", "form.value"): (TextForm.COUNTS.value, "fullmatch"),
    ("vm/domain/copy.py", "f'{re.escape(original)}(?![A-Za-z0-9])'"): (
        "vm7(?![A-Za-z0-9])",
        "search",
    ),
    ("cluster/kubevirt/manifests.py", "pattern"): (
        r"[a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?",
        "fullmatch",
    ),
    ("measure/runner.py", "pattern"): (r"tokens/s: ([0-9.]+)", "search"),  # the user's own
    ("measure/programs/torch_place.py", r"f'(?<!\\w)(?:{names}):\\s+(\\d+) kB'"): (
        r"(?<!\w)(?:MemFree|MemTotal):\s+(\d+) kB",
        "search",
    ),
    ("measure/programs/torch_place.py", r"f'(?<!\\S)\\S*/lib{name}[^/\\s]*\\.so[^/\\s]*'"): (
        r"(?<!\S)/x/libnccl\.so[^/\s]*",
        "search",
    ),
    ("machine/snapshot/collector.py", "f'({pattern}):(.*)'"): (
        "(sys/bus/pci/devices/[^/]*/numa[0-9]+):(.*)",
        "fullmatch",
    ),
    ("machine/snapshot/collector.py", "'|'.join((f'({pattern}):' for pattern in patterns))"): (
        "(sys/[^/]*/a):|(sys/cpu[0-9]+/b):",
        "match",
    ),
    ("machine/snapshot/gather.py", "translate(part)"): (
        fnmatch.translate("cpu[0-9]*"),
        "fullmatch",
    ),
    (
        "machine/snapshot/pseudonyms.py",
        r"f'({_PLACE_OF_HOST}){re.escape(word)}(?![\\w-]|\\.\\w)'",
    ): (rf"({_PLACE_OF_HOST})gpu7(?![\w-]|\.\w)", "finditer"),
    ("machine/snapshot/pseudonyms.py", "f'(?<![A-Za-z0-9])(?:{choice})(?![A-Za-z0-9])'"): (
        "(?<![A-Za-z0-9])(?:gpu77|gpu7)(?![A-Za-z0-9])",
        "finditer",
    ),
    ("machine/snapshot/redact.py", "'|'.join(map(re.escape, words))"): ("a|b", "fullmatch"),
    ("vm/targets/target.py", "target.users_own"): (
        "|".join(f"(?:{one})" for name in TARGETS if (one := find_target(name).users_own)),
        "match",
    ),
}
"""Patterns that a function makes, by file and text: what it makes, and the method it is used by."""


def _calls(nodes: Sequence[ast.AST]) -> Iterator[tuple[ast.Call, bool]]:
    """Calls of re's functions, and whether each is in a function."""
    inside = {
        below
        for node in nodes
        if isinstance(node, ast.FunctionDef | ast.Lambda)
        for below in ast.walk(node)
        if below is not node
    }
    for node in nodes:
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
            continue
        if isinstance(node.func.value, ast.Name) and node.func.value.id == "re":
            yield node, node in inside


def _unseen(inside: str, nodes: Sequence[ast.AST], seen: set[Any]) -> Iterator[str]:
    """What no case below is made of. seen: the texts of those that are."""
    for call, in_function in _calls(nodes):
        assert isinstance(call.func, ast.Attribute)
        name, where = call.func.attr, f"{inside}:{call.lineno}"
        if name == "escape":
            continue
        if name not in {*METHODS, "compile"} or not call.args:
            yield f"{where}: re.{name}"
            continue
        text = call.args[0]
        if isinstance(text, ast.Constant):
            if text.value not in seen or (in_function and name == "compile"):
                yield f"{where}: {text.value!r}: make it a constant of the module"
        elif in_function and (inside, ast.unparse(text)) not in BUILT:
            yield f"{where}: {ast.unparse(text)}: made in a function, and not in BUILT"
    for node in nodes:
        if isinstance(node, ast.ImportFrom) and node.module in ("re", "regex"):
            yield f"{inside}:{node.lineno}: import re, so that its uses are found"
        elif isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name == "regex" or (alias.name == "re" and alias.asname):
                    yield f"{inside}:{node.lineno}: import re, so that its uses are found"


@cache
def cases() -> tuple[Case, ...]:
    """Every pattern of the source, of which all modules are imported and walked."""
    built = (
        (f"{file}: {text}", re.compile(made), how) for (file, text), (made, how) in BUILT.items()
    )
    forms = ((form.name, re.compile(form.value, re.ASCII), "fullmatch") for form in TextForm)
    return (*_named(), *_in_line(), *built, *forms)


def test_every_pattern_is_looked_at() -> None:
    seen = {pattern.pattern for _, pattern, _ in cases()}
    unseen: list[str] = []
    built = set()
    for path in FILES:
        inside = str(path.relative_to(SOURCE))
        unseen += _unseen(inside, nodes(path), seen)
        built |= {
            (inside, ast.unparse(call.args[0])) for call, _ in _calls(nodes(path)) if call.args
        }
    assert not unseen, "\n".join(unseen)
    assert BUILT.keys() <= built


@pytest.mark.parametrize(
    "text",
    [
        "re.compile('new+')",
        "def f(): return re.match('new+', x)",
        "def f(): return re.compile('a')",
        "def f(x): return re.search(x, y)",
        "def f(x): return re.compile(f'{x}+')",
        "re.template('a')",
        "from re import compile",
        "import re as r",
        "import regex",
    ],
)
def test_a_new_pattern_is_found(text: str) -> None:
    assert list(_unseen("x.py", list(ast.walk(ast.parse(text))), {"a"}))


def test_time_grows_no_faster_than_the_text() -> None:
    texts = {name: slow_text(pattern, method) for name, pattern, method in cases()}
    assert {name: text for name, text in texts.items() if text is not None} == {}


@pytest.mark.parametrize(
    ("pattern", "method"),
    [
        (r"=+ ?(.*?) ?=+", "fullmatch"),
        (r"(a+)+\Z", "match"),
        (r"(?:a|aa)*b", "match"),
        (r"\s+\Z", "search"),
        (r"\w+\+", "finditer"),
        (r"(\S+).*x", "match"),
        (r"(?:x[^;]*;)*y", "search"),
        (rb"(?:[ \t]*<!--[^\r\n]*?-->)+[ \t]*(?=[\r\n]|\Z)", "match"),
    ],
)
def test_a_pattern_that_is_not_linear_is_found(pattern: str, method: str) -> None:
    assert slow_text(re.compile(pattern), method) is not None
