"""How large the house is: make check prints no more than what is past tests/house_bounds.toml.

python -m tests.house_counts prints all. Text is what a user can read of the program: every file of
src, and the pages of findings and commands as they are in git. Code is what is no
blank line, comment or docstring; a record is a class of msgspec.Struct or a dataclass.
"""

import ast
import io
import sys
import tokenize
import tomllib
from collections.abc import Iterator
from pathlib import Path

from homenode.findings import catalogue
from homenode.formats import VERSIONS
from tests.command_line import every_command
from tests.source_trees import FILES, nodes

ROOT = Path(__file__).parents[1]
BOUNDS = ROOT / "tests/house_bounds.toml"
WIDTH = 160

_NO_CODE = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
}
_STRING = (ast.Constant, ast.JoinedStr)


def _code_lines(path: Path) -> int:
    """Lines with a token on them, without those of strings that stand as statements."""
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(path.read_text()).readline):
        if token.type not in _NO_CODE:
            lines.update(range(token.start[0], token.end[0] + 1))
    for node in nodes(path):
        if isinstance(node, ast.Expr) and isinstance(node.value, _STRING):
            lines.difference_update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return len(lines)


def _classes() -> Iterator[ast.ClassDef]:
    for path in FILES:
        yield from (node for node in nodes(path) if isinstance(node, ast.ClassDef))


def _records() -> list[ast.ClassDef]:
    """Those whose base is a Struct or another record, or that are decorated as dataclasses."""
    classes = list(_classes())
    names = {"Struct"}
    while True:
        found = [one for one in classes if _is_dataclass(one) or not names.isdisjoint(_bases(one))]
        if {one.name for one in found} <= names:
            return found
        names |= {one.name for one in found}


def _bases(node: ast.ClassDef) -> set[str]:
    bases = [base.value if isinstance(base, ast.Subscript) else base for base in node.bases]
    return {getattr(base, "id", getattr(base, "attr", "")) for base in bases}


def _is_dataclass(node: ast.ClassDef) -> bool:
    return any("dataclass" in ast.unparse(one) for one in node.decorator_list)


def _has_vcpus(node: ast.ClassDef) -> bool:
    fields = (one.target for one in node.body if isinstance(one, ast.AnnAssign))
    return any(isinstance(one, ast.Name) and one.id == "vcpus" for one in fields)


def _texts(*directories: str) -> list[Path]:
    """Files below these directories, without what Python compiled."""
    paths = (path for directory in directories for path in (ROOT / directory).rglob("*"))
    return [path for path in paths if path.is_file() and "__pycache__" not in path.parts]


def _lines(paths: list[Path]) -> int:
    return sum(path.read_bytes().count(b"\n") for path in paths)


def counts(*, code: bool = True) -> dict[str, int]:
    """By name. code: to count lines of code as well takes as long as all others."""
    records = _records()
    src = _texts("src")
    text = [*src, *_texts("docs/reference/commands", "docs/reference/findings")]
    commands = [command for _, command in every_command() if command.record]
    return {
        "text lines": _lines(text),
        "text bytes": sum(path.stat().st_size for path in text),
        "Python lines": _lines(FILES),
        **({"code lines": sum(map(_code_lines, FILES))} if code else {}),
        "modules": len(FILES),
        "records": len(records),
        "records with vcpus": sum(map(_has_vcpus, records)),
        "commands": len(commands),
        "options": sum(bool(each.opt.names) for command in commands for each in command.parameters),
        "finding ids": len(catalogue()),
        "document kinds": len(VERSIONS),
        "test lines": _lines([path for path in _texts("tests") if path.suffix == ".py"]),
        f"lines over {WIDTH} columns": sum(
            len(line) > WIDTH for path in src for line in path.read_text().splitlines()
        ),
    }


def bounds() -> dict[str, int]:
    return tomllib.loads(BOUNDS.read_text())


def main() -> int:
    is_check = sys.argv[1:] == ["--check"]
    found = counts(code=not is_check)
    most = bounds()
    past = {name: count for name, count in found.items() if count > most.get(name, count)}
    for name, count in (past if is_check else found).items():
        limit = f", at most {most[name]:,}" if name in most else ""
        print(f"{count:10,} {name}{limit}")
    if past:
        print(f"past {BOUNDS.relative_to(ROOT)}: {', '.join(past)}")
    return int(bool(past))


if __name__ == "__main__":
    sys.exit(main())
