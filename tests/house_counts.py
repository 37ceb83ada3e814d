"""How large src is: python -m tests.house_counts prints it, tests/test_house_style.py bounds it.

Code is what is no blank line, comment or docstring; a record is a class of msgspec.Struct or a
dataclass.
"""

import ast
import io
import tokenize
from collections.abc import Iterator
from pathlib import Path

from tests.source_trees import FILES, nodes

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


def counts(*, code: bool = True) -> dict[str, int]:
    """By name. code: to count lines of code as well takes as long as all others."""
    records = _records()
    return {
        "lines": sum(path.read_text().count("\n") for path in FILES),
        **({"code": sum(map(_code_lines, FILES))} if code else {}),
        "modules": len(FILES),
        "records": len(records),
        "records with vcpus": sum(map(_has_vcpus, records)),
    }


if __name__ == "__main__":
    for name, count in counts().items():
        print(f"{count:8,} {name}")
