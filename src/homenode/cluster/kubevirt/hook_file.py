"""HookFile: the hook as one Python file, for a ConfigMap on KubeVirt's own sidecar image.

That image has Python 3.9 (CentOS Stream 9) or 3.12 (Stream 10) and its standard library. The file
is made of the package's own modules: definitions that the hook cannot reach are left out, and what
Python 3.9 does not know is written as it does. No module is compiled before it is imported, since
a file from a ConfigMap has no bytecode.

Source: KubeVirt rpm/BUILD.bazel (sidecar-shim_x86_64_cs9, _cs10), cmd/sidecars/sidecar_shim.go.
"""

import ast
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import TypeVar

from homenode.catalogue import entry_of
from homenode.errors import UsageError
from homenode.input_files import package_text

ENTRY = ("homenode.cluster.kubevirt.hook", "main")
PORTABLE = "homenode.cluster.kubevirt.portable"
CATALOGUE = "homenode.catalogue"
MAX_BYTES = 240 << 10
"""A ConfigMap holds 1 MiB, but `kubectl apply` keeps a copy in annotations, which hold 256 KiB."""

_REPLACED = {
    ("dataclasses", "dataclass"): "dataclass",
    ("dataclasses", "field"): "field",
    ("dataclasses", "replace"): "replace",
    ("enum", "StrEnum"): "StrEnum",
    ("msgspec", "Struct"): "Struct",
    ("msgspec", "field"): "field",
    ("msgspec", "structs"): "structs",
    ("msgspec", "UNSET"): "UNSET",
    ("msgspec.structs", "replace"): "replace",
}
_CATALOGUE = """\
from homenode.findings import filled

class Entry:
    def __init__(self, severity, fixes):
        self.severities, self.fixes = (severity,), fixes

    def printed(self, part, case, values):
        fix = self.fixes.get(case, self.fixes[None])
        return fix and filled(fix, values or {{}})

ENTRIES = {entries!r}

def entry_of(id):
    return Entry(*ENTRIES[id])
"""
"""What the hook has in place of the catalogue and its pages."""
_BOTTOM = """\
sys.meta_path.insert(0, Finder)

from {module} import {name}

{name}()
"""

Node = TypeVar("Node", bound=ast.stmt)


def hook_file(read_source: Callable[[str], str | None], version: str) -> str:
    """The file. read_source: the text of one of the package's modules, None where it has none.

    Raises UsageError where the package uses what cannot be written for Python 3.9.
    """
    bundle = _Bundle(read_source)
    for name in (*_REPLACED.values(), "zip_strict"):
        bundle.reach(PORTABLE, name)
    bundle.reach("homenode.findings", "filled")
    bundle.reach(*ENTRY)
    bundle.settle()
    head = package_text("cluster", "kubevirt", "files", "hook-head.txt")
    parts = [head.replace("@VERSION@", version)]
    pages = {name: entry_of(name) for name in sorted(bundle.finding_ids())}
    entries = {name: (str(page.severities[0]), page.texts("Fix")) for name, page in pages.items()}
    texts = bundle.texts() | {CATALOGUE: _CATALOGUE.format(entries=entries)}
    for name, text in sorted(texts.items()):
        if "'''" in text or not text.isascii():
            text = ascii(text)
            parts.append(f"MODULES[{name!r}] = {text}\n")
        else:
            parts.append(f"MODULES[{name!r}] = r'''\n{text}\n'''\n")
    parts.append(_BOTTOM.format(module=ENTRY[0], name=ENTRY[1]))
    whole = "".join(parts)
    if len(whole) > MAX_BYTES:
        raise UsageError(f"hook file: expected at most {MAX_BYTES} bytes, found {len(whole)}")
    return whole


@dataclass(slots=True)
class _Module:
    """A module's statements by the names that they define.

    kept: statements that the hook reaches. imported: local name -> (module, name there).
    """

    name: str
    body: list[ast.stmt]
    definer: dict[str, ast.stmt]
    imported: dict[str, tuple[str, str]]
    kept: set[ast.stmt] = field(default_factory=set)
    needed: set[str] = field(default_factory=set)


class _Bundle:
    """What the hook reaches, module by module. Methods are reached by their names alone."""

    def __init__(self, read_source: Callable[[str], str | None]) -> None:
        self.read_source = read_source
        self.modules: dict[str, _Module] = {}
        self.packages: set[str] = set()
        self.attributes: set[str] = set()
        self.waiting: list[tuple[_Module, ast.FunctionDef]] = []
        self.kept_methods: set[ast.stmt] = set()

    def module(self, name: str) -> _Module | None:
        if name not in self.modules:
            text = self.read_source(name)
            if text is None:
                return None
            self.modules[name] = _read_module(name, text)
            words = name.split(".")
            self.packages |= {".".join(words[:i]) for i in range(1, len(words))}
        return self.modules[name]

    def reach(self, module_name: str, name: str) -> None:
        """Keep a definition and all that it names."""
        if module_name == CATALOGUE:
            return
        if self.read_source(f"{module_name}.{name}") is not None:
            self.module(f"{module_name}.{name}")  # `from package import module`
            return
        module = self.module(module_name)
        if module is None or name in module.needed:
            return
        if name in module.imported:
            module.needed.add(name)
            self.reach(*module.imported[name])
            return
        statement = module.definer.get(name)
        if statement is None:
            return  # a name of Python's own
        module.needed.add(name)
        if statement in module.kept:
            return
        module.kept.add(statement)
        if isinstance(statement, ast.ClassDef):
            for part in statement.body:
                if isinstance(part, ast.FunctionDef) and not _is_dunder(part.name):
                    self.waiting.append((module, part))
                else:
                    self.scan(module, part)
            self.scan_all(module, [*statement.bases, *statement.decorator_list])
        else:
            self.scan(module, statement)

    def settle(self) -> None:
        """Keep the methods whose names are used, until no more are."""
        found = True
        while found:
            found = False
            for module, method in list(self.waiting):
                if method.name in self.attributes:
                    self.waiting.remove((module, method))
                    self.kept_methods.add(method)
                    self.scan(module, method)
                    found = True

    def scan_all(self, module: _Module, nodes: Iterable[ast.AST]) -> None:
        for node in nodes:
            self.scan(module, node)

    def scan(self, module: _Module, statement: ast.AST) -> None:
        for node in _walk_without_types(statement):
            if isinstance(node, ast.Name):
                self.reach(module.name, node.id)
            elif isinstance(node, ast.Attribute):
                self.attributes.add(node.attr)
                if isinstance(node.value, ast.Name) and node.value.id in module.imported:
                    # `module.name`; of anything else that is imported there is no such module
                    self.reach(".".join(module.imported[node.value.id]), node.attr)
            elif isinstance(node, ast.ImportFrom) and node.module:
                for alias in node.names:
                    self.reach(node.module, alias.name)

    def finding_ids(self) -> set[str]:
        """Of the findings that the hook makes."""
        kept = [one for module in self.modules.values() for one in module.kept]
        calls = (one for statement in kept for one in ast.walk(statement))
        return {
            part.value
            for call in calls
            if isinstance(call, ast.Call)
            and isinstance(call.func, ast.Name)
            and call.func.id == "plan_finding"
            for part in ast.walk(call.args[0])
            if isinstance(part, ast.Constant) and isinstance(part.value, str)
        }

    def texts(self) -> dict[str, str]:
        """Module name -> its text for Python 3.9. What a package does by itself is left out."""
        texts = {name: self._text(module) for name, module in self.modules.items()}
        return dict.fromkeys(self.packages, "") | texts

    def _text(self, module: _Module) -> str:
        dropped = {method for _, method in self.waiting}
        writer = _Writer(module.name, dropped)
        body: list[ast.stmt] = []
        for statement in module.body:
            if isinstance(statement, ast.ImportFrom | ast.Import):
                names = [a for a in statement.names if (a.asname or a.name) in module.needed]
                if names:
                    body += writer.imports(statement, names)
            elif statement in module.kept:
                written = writer.visit(statement)
                body += written if isinstance(written, list) else [written]
        if writer.needs_zip:
            body.insert(0, _import_from(PORTABLE, "zip_strict"))
        return ast.unparse(ast.fix_missing_locations(ast.Module(body, [])))


_ROWS = "homenode.vm.domain.codec"
_STEPS_FROM = {"ElementRow": 3, "_row": 3, "_once": 3}
"""From which argument on a row names the steps that write it. The hook has steps of its own
(PCIE_STEPS): it needs only how rows are read."""


class _WithoutSteps(ast.NodeTransformer):
    """The rows of a domain document without what writes them."""

    def visit_Call(self, node: ast.Call) -> ast.Call:
        if isinstance(node.func, ast.Name) and node.func.id in _STEPS_FROM:
            node.args = node.args[: _STEPS_FROM[node.func.id]]
        return node


def _read_module(name: str, text: str) -> _Module:
    module = _Module(name, [], {}, {})
    tree = ast.parse(text, name)
    if name == _ROWS:
        _WithoutSteps().visit(tree)
    for statement in tree.body:
        match statement:
            case ast.Expr(value=ast.Constant()):
                continue  # a docstring, of the module or of the constant above
            case ast.If() if _is_for_types(statement) or _is_main(statement):
                continue
            case ast.ImportFrom(module=str(source)):
                for alias in statement.names:
                    module.imported[alias.asname or alias.name] = (source, alias.name)
            case ast.Import():
                for alias in statement.names:
                    module.imported[alias.asname or alias.name] = (alias.name, "")
            case ast.FunctionDef() | ast.ClassDef():
                module.definer[statement.name] = statement
            case ast.Assign():
                for target in statement.targets:
                    for node in ast.walk(target):
                        if isinstance(node, ast.Name):
                            module.definer[node.id] = statement
            case ast.AnnAssign(target=ast.Name(id=str(defined))):
                module.definer[defined] = statement
            case _:
                raise _unknown(name, statement)
        module.body.append(statement)
    return module


def _is_for_types(statement: ast.If) -> bool:
    return isinstance(statement.test, ast.Name) and statement.test.id == "TYPE_CHECKING"


def _is_main(statement: ast.If) -> bool:
    return ast.unparse(statement.test) == "__name__ == '__main__'"


def _is_dunder(name: str) -> bool:
    return name.startswith("__") and name.endswith("__")


def _unknown(name: str, node: ast.stmt | ast.pattern) -> UsageError:
    return UsageError(
        f"{name}, line {node.lineno}: expected what the hook file can have, found "
        f"{type(node).__name__}"
    )


def _walk_without_types(node: ast.AST) -> Iterator[ast.AST]:
    """As ast.walk, annotations left out."""
    stack = [node]
    while stack:
        here = stack.pop()
        yield here
        for name, value in ast.iter_fields(here):
            if name in ("annotation", "returns"):
                continue
            stack += (
                [v for v in value if isinstance(v, ast.AST)]
                if isinstance(value, list)
                else ([value] if isinstance(value, ast.AST) else [])
            )


def _import_from(module: str, *names: str) -> ast.ImportFrom:
    return ast.ImportFrom(module, [ast.alias(name) for name in names], 0)


class _Writer(ast.NodeTransformer):
    """Statements as Python 3.9 takes them: no annotations, docstrings or `match`."""

    def __init__(self, name: str, dropped: set[ast.FunctionDef]) -> None:
        self.name = name
        self.dropped = dropped
        self.needs_zip = False

    def imports(
        self, statement: ast.ImportFrom | ast.Import, names: list[ast.alias]
    ) -> list[ast.stmt]:
        if isinstance(statement, ast.Import):
            return [ast.Import(names)]
        source = statement.module or ""
        ours = [a for a in names if (source, a.name) in _REPLACED]
        theirs = [a for a in names if a not in ours]
        found: list[ast.stmt] = []
        if theirs:
            found.append(ast.ImportFrom(source, theirs, 0))
        if ours:
            found.append(ast.ImportFrom(PORTABLE, ours, 0))
        return found

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        arguments = node.args
        every = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
        for argument in (*every, arguments.vararg, arguments.kwarg):
            if argument is not None:
                argument.annotation = None
        node.returns = None
        node.body = _without_docstring(node.body)
        self.generic_visit(node)
        node.body = node.body or [ast.Pass()]
        return node

    def visit_ClassDef(self, node: ast.ClassDef) -> ast.AST:
        is_record = any("dataclass" in ast.unparse(d) for d in node.decorator_list)
        is_record |= any(ast.unparse(base) == "Struct" for base in node.bases)
        is_tuple = any("NamedTuple" in ast.unparse(base) for base in node.bases)
        fields: list[str] = []
        body: list[ast.stmt] = []
        for statement in _without_docstring(node.body):
            if statement in self.dropped or _is_text(statement):
                continue
            if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
                is_shared = "ClassVar" in ast.unparse(statement.annotation)
                if is_record and not is_shared:
                    fields.append(statement.target.id)
                if is_tuple:
                    statement.annotation = ast.Name("object", ast.Load())
                    body.append(statement)
                elif statement.value is not None:
                    body.append(ast.Assign([statement.target], statement.value))
                continue
            body.append(statement)
        if is_record:
            listed: list[ast.expr] = [ast.Constant(name) for name in fields]
            names = ast.Tuple(listed, ast.Load())
            body.insert(0, ast.Assign([ast.Name("__fields__", ast.Store())], names))
        node.body = body
        self.generic_visit(node)
        node.body = node.body or [ast.Pass()]
        return node

    def visit_AnnAssign(self, node: ast.AnnAssign) -> ast.AST | None:
        if isinstance(node.annotation, ast.Name) and node.annotation.id == "object":
            return self.generic_visit(node)  # a field of a NamedTuple
        if node.value is None:
            return None
        return self.generic_visit(ast.Assign([node.target], node.value))

    def visit_Call(self, node: ast.Call) -> ast.AST:
        self.generic_visit(node)
        called = node.func
        if isinstance(called, ast.Name) and called.id == "zip":
            strict = [k for k in node.keywords if k.arg == "strict"]
            is_strict = any(isinstance(k.value, ast.Constant) and k.value.value for k in strict)
            node.keywords = []
            if is_strict:
                self.needs_zip = True
                node.func = ast.Name("zip_strict", ast.Load())
        elif isinstance(called, ast.Name) and called.id == "isinstance":
            node.args[1] = _tuple_of_union(node.args[1])
        elif isinstance(called, ast.Attribute) and called.attr == "bit_count":
            digits = ast.Call(ast.Name("bin", ast.Load()), [called.value], [])
            return ast.Call(ast.Attribute(digits, "count", ast.Load()), [ast.Constant("1")], [])
        return node

    def visit_JoinedStr(self, node: ast.JoinedStr) -> ast.AST:
        """An f-string as format(): Python 3.12 writes f-strings that 3.9 does not read."""
        self.generic_visit(node)
        values: list[ast.expr] = []
        text = "".join(_format_piece(piece, values) for piece in node.values)
        if not values:
            return ast.Constant(text.replace("{{", "{").replace("}}", "}"))
        return ast.Call(ast.Attribute(ast.Constant(text), "format", ast.Load()), values, [])

    def visit_Match(self, node: ast.Match) -> ast.AST:
        """Values and a wildcard, as if and elif."""
        self.generic_visit(node)
        branches: list[ast.stmt] = []
        for case in reversed(node.cases):
            if case.guard is not None:
                raise _unknown(self.name, node)
            tests = [self._test(node.subject, p) for p in _alternatives(case.pattern)]
            if None in tests:
                branches = case.body
                continue
            known = [test for test in tests if test is not None]
            test = known[0] if len(known) == 1 else ast.BoolOp(ast.Or(), list(known))
            branches = [ast.If(test, case.body, branches)]
        return branches[0]

    def _test(self, subject: ast.expr, pattern: ast.pattern) -> ast.expr | None:
        if isinstance(pattern, ast.MatchAs) and pattern.pattern is None and pattern.name is None:
            return None
        if isinstance(pattern, ast.MatchValue):
            return ast.Compare(subject, [ast.Eq()], [pattern.value])
        if isinstance(pattern, ast.MatchSingleton):
            return ast.Compare(subject, [ast.Is()], [ast.Constant(pattern.value)])
        raise _unknown(self.name, pattern)


def _without_docstring(body: list[ast.stmt]) -> list[ast.stmt]:
    return body[1:] if body and _is_text(body[0]) else body


def _is_text(statement: ast.stmt) -> bool:
    return (
        isinstance(statement, ast.Expr)
        and isinstance(statement.value, ast.Constant)
        and isinstance(statement.value.value, str)
    )


def _alternatives(pattern: ast.pattern) -> list[ast.pattern]:
    return pattern.patterns if isinstance(pattern, ast.MatchOr) else [pattern]


def _tuple_of_union(node: ast.expr) -> ast.expr:
    """A | B as (A, B)."""
    if not isinstance(node, ast.BinOp) or not isinstance(node.op, ast.BitOr):
        return node
    parts: list[ast.expr] = []
    here: ast.expr = node
    while isinstance(here, ast.BinOp) and isinstance(here.op, ast.BitOr):
        parts.insert(0, here.right)
        here = here.left
    return ast.Tuple([here, *parts], ast.Load())


def _format_piece(piece: ast.expr, values: list[ast.expr]) -> str:
    """A piece of an f-string as a piece of format()'s text; its values are added to values."""
    if isinstance(piece, ast.Constant):
        return str(piece.value).replace("{", "{{").replace("}", "}}")
    if not isinstance(piece, ast.FormattedValue):
        raise UsageError(f"expected a value in an f-string, found {type(piece).__name__}")
    values.append(piece.value)
    conversion = "" if piece.conversion == -1 else f"!{chr(piece.conversion)}"
    spec = ""
    if isinstance(piece.format_spec, ast.JoinedStr):
        spec = ":" + "".join(_format_piece(inner, values) for inner in piece.format_spec.values)
    elif isinstance(piece.format_spec, ast.Call):  # visited already: format() of a text
        call = piece.format_spec
        assert isinstance(call.func, ast.Attribute) and isinstance(call.func.value, ast.Constant)
        values += call.args
        spec = f":{call.func.value.value!s}"
    elif isinstance(piece.format_spec, ast.Constant):
        spec = f":{piece.format_spec.value!s}"
    return f"{{{conversion}{spec}}}"
