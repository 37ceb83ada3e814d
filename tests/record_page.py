"""docs/reference/records.md: records that `homenode.api` gives, with fields, from the code."""

import ast
import enum
import inspect
import itertools
import re
import types
import typing
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Annotated, Any, cast

from msgspec import Struct
from msgspec.structs import fields

from homenode import api
from homenode.cli.command import read_option_helps
from homenode.option import Opt
from tests.stored_records import meanings

_HEAD = """# Records

What the functions of [homenode.api](python.md) give, field by field.
Records are frozen: `msgspec.structs.replace` makes a changed one, `to_json` the documented format
of those that have one. `None` is "not known", or what the record says of it.
"""
_MODULE = re.compile(r"\b(?:homenode|collections\.abc|typing)(?:\.\w+)*\.(?=\w)")
_LINK = re.compile(r"\[([^\]]*)\]\(([^)\s]+)\)")
_DEFINED = re.compile(r"(?:(?<=^)|(?<=[.;] ))((?:\w+, )*\w+): ")


def records() -> dict[str, type]:
    """The exported records and enumerations and those that their fields hold, by name."""
    found: dict[str, type] = {}
    left = [one for name in api.__all__ if _is_record(one := getattr(api, name))]
    while left:
        one = left.pop(0)
        if one.__name__ not in found:
            found[one.__name__] = one
            left += [held for hint in _hints(one).values() for held in _held(hint)]
    return found


def page() -> str:
    """The whole page: what the interface names, then what those hold, sorted by name."""
    known = records()
    named = sorted(set(known) & set(api.__all__))
    others = sorted(set(known) - set(named))
    parts, of_pages = [_HEAD], meanings()
    for title, names in (("The interface's own", named), ("What they hold", others)):
        parts.append(f"## {title}\n")
        parts += [_section(known[name], known, of_pages) for name in names]
    return "\n".join(parts)


def _moved(link: "re.Match[str]") -> str:
    """A link of a format page's, seen from this page: its own anchors are omitted."""
    words, target = link.groups()
    if target.startswith("#"):
        return words
    return f"[{words}]({target[3:] if target.startswith('../') else f'formats/{target}'})"


def _is_record(one: object) -> bool:
    return inspect.isclass(one) and issubclass(one, (Struct, enum.Enum))


def _hints(one: type) -> dict[str, Any]:
    if issubclass(one, Struct):
        hints = typing.get_type_hints(one, include_extras=False)
        return {field.name: hints[field.name] for field in fields(one)}
    return {}


@cache
def _classes(file: str) -> tuple[list[str], dict[str, ast.ClassDef]]:
    """The lines of a file, and its classes."""
    text = Path(file).read_text(encoding="utf-8")
    body = ast.parse(text).body
    return text.splitlines(), {one.name: one for one in body if isinstance(one, ast.ClassDef)}


def _comments(one: type) -> dict[str, str]:
    """What the comment behind each field, or the lines above it, say of it."""
    lines, classes = _classes(inspect.getfile(one))
    found: dict[str, str] = {}
    for node in classes[one.__name__].body:
        if not isinstance(node, ast.AnnAssign):
            continue
        name, at = ast.unparse(node.target), node.lineno - 1
        above = itertools.takewhile(lambda line: line.startswith("    # "), lines[:at][::-1])
        parts = [line.strip("# ") for line in above][::-1]
        behind = lines[(node.end_lineno or at) - 1].partition("  # ")[2]
        found[name] = " ".join([*parts, behind]).strip()
    return found


def _held(hint: Any) -> Iterator[type]:
    if _is_record(hint):
        yield hint
    for inner in typing.get_args(hint):
        yield from _held(inner)


def _section(one: type, known: dict[str, type], of_pages: dict[tuple[type, str], str]) -> str:
    text = inspect.cleandoc(one.__doc__ or "")
    text = re.split(r"\n\s*>>> |\n\nOptions:\n", text)[0].strip()
    hints, helps = _hints(one), read_option_helps(cast(Any, one))
    comments = _comments(one)
    said = (_paragraph(part.replace("\n", " "), hints) for part in text.split("\n\n"))
    lines = [f"### {one.__name__}", *said]
    if issubclass(one, enum.Enum):
        values = ", ".join(f"`{value.value}`" for value in one)
        return "\n\n".join([*lines, f"Values: {values}.\n"])
    own = typing.get_type_hints(one, include_extras=True)
    rows = ["| field | type | default | meaning, where the text above does not say it |"]
    rows.append("|---|---|---|---|")
    for field in fields(one):  # type: ignore[arg-type]  # an enumeration has returned above
        default = "" if field.required else _default(field)
        options = [opt for opt in typing.get_args(own[field.name]) if isinstance(opt, Opt)]
        is_said = re.search(rf"`{field.name}`.*: ", "\n".join(lines)) is not None
        meaning = "" if is_said else _escaped(comments.get(field.name, ""))
        meaning = meaning or ("" if is_said else of_pages.get((one, field.name), ""))
        if options and not is_said:
            meaning = _escaped(helps.get(field.name, options[0].help))
        shown = _type(hints[field.name], known)
        rows.append(f"| `{field.name}` | {shown} | {default} | {_LINK.sub(_moved, meaning)} |")
    return "\n\n".join([*lines, "\n".join(rows) + "\n"])


def _paragraph(text: str, names: dict[str, Any]) -> str:
    """What is said of single fields becomes a list, a line each."""
    parts = _DEFINED.split(text)
    shown = _escaped(parts[0]).strip()
    for subject, said in zip(parts[1::2], parts[2::2], strict=True):
        fields_named = [one.strip() for one in subject.split(",")]
        if set(fields_named) <= names.keys():
            shown += f"\n* {', '.join(f'`{one}`' for one in fields_named)}: "
        else:
            shown += f" {subject}: "
        shown += _escaped(said).strip()
    return shown.strip()


def _default(field: Any) -> str:
    value = field.default
    if not isinstance(value, (str, int, float, bool, tuple, frozenset, type(None), enum.Enum)):
        return "empty"
    shown = f'"{value.value}"' if isinstance(value, enum.Enum) else repr(value)
    return f"`{shown}`" if len(shown) < 40 else "see the code"


def _type(hint: Any, known: dict[str, type]) -> str:
    """A type in the words of annotations, records as links."""
    if hint is type(None):
        return "None"
    if hint is Ellipsis:
        return "…"
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if origin is Annotated:
        return _type(inner[0], known)
    if origin in (typing.Union, types.UnionType):
        return " or ".join(_type(one, known) for one in inner)
    if origin is not None:
        name = getattr(origin, "__name__", str(origin))
        return f"{name}\\[{', '.join(_type(one, known) for one in inner)}\\]"
    name = getattr(hint, "__name__", _MODULE.sub("", str(hint)))
    return f"[{name}](#{name.lower()})" if name in known else str(name)


def _escaped(text: str) -> str:
    return re.sub(r"([<>|*_\[\]])", r"\\\1", text)
