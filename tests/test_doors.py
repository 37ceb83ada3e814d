"""Files are read by `input_files` and written by `durable`, and nothing else opens one.

A new reader or writer fails here: it belongs into the doors, or into EXCEPTIONS with its reason.
"""

import ast
from collections.abc import Iterator, Sequence
from functools import cache

import pytest

from tests.source_trees import FILES, SOURCE, nodes

DOORS = {"safe/input_files.py", "safe/durable.py"}
OF_GUESTS = "measure/programs/"
"""Run by a guest's own Python, on its own files; they import nothing of homenode."""

_NAMES_BY_EFFECT = {
    "opens a file": """
        open fdopen open_code open_file FileText FileBinaryRead FileTextWrite
        FileBinaryWrite FileHandler memfd_create FileIO GzipFile BZ2File LZMAFile TarFile
    """,
    "opens files": "FileSystemLoader",
    "starts a program past `process`": """
        posix_spawn posix_spawnp create_subprocess_exec create_subprocess_shell check_output
        check_call Popen
    """,
    "reads a file": "read_text read_bytes fromfile iterparse XInclude",
    "writes a file": "write_text write_bytes touch mknod mkfifo truncate",
    "writes a link": "symlink_to hardlink_to link_to",
    "copies a file": "copyfile copyfileobj copy2 sendfile copy_file_range",
    "copies files": "copytree make_archive unpack_archive",
    "removes a file": "unlink",
    "removes files": "rmtree removedirs",
    "renames a file": "renames rename",
    "changes a file": "copymode copystat chown chmod lchmod lchown setxattr",
    "names a temporary file": "mktemp",
    "makes a temporary file": "mkstemp NamedTemporaryFile TemporaryFile SpooledTemporaryFile",
    "makes a temporary directory": "mkdtemp TemporaryDirectory",
}
NAMES = {name: effect for effect, names in _NAMES_BY_EFFECT.items() for name in names.split()}
"""What opens, copies or removes a file, as a method, a function or an imported name."""

_QUALIFIED_BY_EFFECT = {
    "copies a file": "shutil.copy",
    "renames a file": "shutil.move os.rename os.replace",
    "writes a link": "os.link os.symlink",
    "removes a file": "os.remove",
    "reads a file": "etree.parse",
    "starts a program past `process`": "os.popen os.system subprocess.run subprocess.call",
    "asks a device": "fcntl.ioctl",
    "opens a file": "logging.basicConfig",
    "reads standard input": "sys.stdin",
}
QUALIFIED = {
    name: effect for effect, names in _QUALIFIED_BY_EFFECT.items() for name in names.split()
}

LAST = {*NAMES, *(name.rpartition(".")[2] for name in QUALIFIED)}

BY_NAME = {"CSS", "DTD", "ElementTree", "HTML", "RelaxNG", "Schematron", "XMLSchema"}
"""Classes of libraries that open what file= or filename= names."""

MODULES = {
    *"""
    _io configparser ctypes dbm duckdb fileinput http linecache mailbox marshal mmap netrc numpy
    pandas pickle pkgutil plistlib posix runpy shelve sqlite3 urllib xml yaml zipfile zipimport
""".split()
}
"""Modules that open files by their names."""

_OWN = "in homenode's own state directory, or of a file that it has just looked at"
_HELD = "below a descriptor that is held"
EXCEPTIONS: dict[str, dict[str, str]] = {
    "change/journal.py": {"unlink": _OWN, "rmtree": _OWN},
    "cluster/kubevirt/commands.py": {"sys.stdin": "a tar that its reader counts"},
    "cli/terminal.py": {
        "sys.stdin": "whether it is a terminal, and an answer typed there",
        **dict.fromkeys(("open", "fdopen", "os.O_RDWR"), "/dev/null"),
    },
    "vm/domain/document.py": {"xml.parsers": "expat, which is given a text"},
    "vm/domain/schema.py": {
        "etree.parse": "libvirt's schema below /usr, whose parts libxml2 opens"
    },
    "measure/trial/runner.py": {"shutil.move": "a run's directory, by its name"},
    "measure/tool_setup.py": {"unlink": "a program whose way and sum were looked at"},
    "cluster/kubevirt/object.py": {"yaml": "it is given a text"},
    "cluster/kubevirt/files/on_define_domain.py": {
        "xml.etree": "a text of KubeVirt's",
        "read_text": "of /sys, in the sidecar of one VM",
    },
    "package_data.py": {"read_text": "of the package"},
    "process.py": {"Popen": "the one way to start a program"},
    "measure/results/store.py": {
        "TemporaryFile": "without a name",
        "rename": _HELD,
        "rmtree": _HELD,
    },
    "machine/snapshot/capture.py": {"GzipFile": "in memory", "open": "tarfile, in memory"},
    "machine/snapshot/protocol.py": {"read_text": "of a snapshot"},
    "measure/importers/__init__.py": {"pkgutil": "names of its own modules"},
    "vm/targets/hypervisors/__init__.py": {"pkgutil": "names of its own modules"},
    "safe/record_directory.py": {
        "TemporaryDirectory": "the one way to a directory of this user alone",
        "setxattr": "of a descriptor",
    },
    "check/verify/boot/boot_directory.py": dict.fromkeys(
        ("open", "fdopen", "rmtree", "os.O_RDONLY", "os.O_DIRECTORY", "os.O_NOFOLLOW"),
        "its own directory, and a file that durable has made",
    ),
    "check/verify/boot/forms.py": {"xml.sax.saxutils": "quotes"},
}
"""file -> what it uses -> why it may."""

SNAPSHOTS = {"Snapshot", "LiveSnapshot", "DirectorySnapshot", "MemorySnapshot"}
"""Their read_text is a method of ours: it reads through the door, or of a mapping."""


def _uses(nodes: Sequence[ast.AST]) -> Iterator[tuple[str, int, str]]:
    """(name, line, what it does) of what opens, copies or removes a file."""
    parents = {child: node for node in nodes for child in ast.iter_child_nodes(node)}
    for node in nodes:
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.partition(".")[0] in MODULES or alias.name.startswith("importlib."):
                    yield alias.name, node.lineno, "is imported"
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            module = node.module or ""
            if module.partition(".")[0] in MODULES or module.startswith("importlib."):
                yield module, node.lineno, "is imported"
            for alias in node.names:
                what = NAMES.get(alias.name) or QUALIFIED.get(f"{module}.{alias.name}")
                if what is not None and module.partition(".")[0] != "homenode":
                    yield f"{module}.{alias.name}", node.lineno, what
        elif isinstance(node, ast.Attribute) and (node.attr in LAST or node.attr.startswith("O_")):
            said = ast.unparse(node)
            what = NAMES.get(node.attr) or QUALIFIED.get(said)
            if what is not None and not _is_ours(node, parents):
                yield node.attr if node.attr in NAMES else said, node.lineno, what
            if node.attr.startswith("O_") and said.startswith("os.") and node.attr != "O_CLOEXEC":
                yield said, node.lineno, "opens a file"
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load):
            if node.id in ("open", "__import__", "exec", "eval", "compile", "globals"):
                yield node.id, node.lineno, "opens a file"
            elif node.id in ("os", "shutil") and isinstance(parents[node], ast.Assign | ast.Call):
                yield node.id, node.lineno, "gets another name"
        elif isinstance(node, ast.keyword) and node.arg in ("file", "filename"):
            if ast.unparse(parents[node]).partition("(")[0].rpartition(".")[2] in BY_NAME:
                yield f"{node.arg}=", node.value.lineno, "opens a file"
        elif isinstance(node, ast.Constant) and _is_looked_up(node, parents):
            yield f"{node.value!r}", node.lineno, "is looked up by its name"


def _is_looked_up(node: ast.Constant, parents: dict[ast.AST, ast.AST]) -> bool:
    """Whether it names what this test looks for, in getattr(x, "open") and its like."""
    call = parents.get(node)
    if node.value not in NAMES or not isinstance(call, ast.Call):
        return False
    named = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
    return named in ("getattr", "attrgetter", "methodcaller", "__getattribute__")


def _is_ours(node: ast.Attribute, parents: dict[ast.AST, ast.AST]) -> bool:
    """Whether this is a field or method of ours, or of what is annotated as a snapshot."""
    if not isinstance(node.value, ast.Name):
        return False
    if node.value.id == "self":
        return True  # a class of ours, which is no path
    if node.attr != "read_text":
        return False
    above: ast.AST | None = node
    while above is not None:
        above = parents.get(above)
        if isinstance(above, ast.FunctionDef | ast.Lambda):
            given = (*above.args.posonlyargs, *above.args.args, *above.args.kwonlyargs)
            for one in given:
                if one.arg == node.value.id:
                    said = "" if one.annotation is None else ast.unparse(one.annotation)
                    return said.strip("'\"") in SNAPSHOTS
    return False


@cache
def _found() -> list[tuple[str, str, int, str]]:
    found = []
    for path in FILES:
        inside = str(path.relative_to(SOURCE))
        if inside not in DOORS and not inside.startswith(OF_GUESTS):
            uses = _uses(nodes(path))
            found += [(inside, name, line, what) for name, line, what in uses]
    return found


def test_nothing_but_the_doors_opens_a_file() -> None:
    broken = [
        f"{inside}:{line}: {name}: {what}"
        for inside, name, line, what in _found()
        if name not in EXCEPTIONS.get(inside, {})
    ]
    assert not broken, "\n".join(broken)


def test_each_exception_is_one() -> None:
    used = {(inside, name) for inside, name, _, _ in _found()}
    rooms = {path.name for path in SOURCE.iterdir()}  # an installation may be without the cluster's
    named = {(inside, name) for inside, names in EXCEPTIONS.items() for name in names}
    assert {(inside, name) for inside, name in named if inside.split("/")[0] in rooms} <= used


@pytest.mark.parametrize(
    "text",
    [
        "open(path)",
        "path.open('rb').read()",
        "from io import open as o",
        "import os; os.open(path, 0)",
        "from os import open",
        "path.read_text()",
        "read = path.read_bytes",
        "getattr(path, 'read_' 'text')()",
        "def f(path: Path): return path.read_text()",
        "def f(snapshot): return snapshot.read_text()",
        "from tarfile import TarFile",
        "import sqlite3",
        "import importlib.resources",
        "from importlib.resources import files",
        "from gzip import GzipFile",
        "import shutil; shutil.copy(a, b)",
        "from shutil import copy",
        "etree.parse(path)",
        "import io; io.FileIO(path)",
        "exec(text)",
        "path.unlink()",
        "os.replace(a, b)",
        "path.symlink_to(x)",
        "tempfile.mkstemp()",
        "flags = os.O_WRONLY",
        "sys.stdin.read()",
        "etree.XMLSchema(file=path)",
        "HTML(filename=path).write_pdf(out)",
        "typer.open_file(path)",
        "def f(x: typer.FileText): pass",
        "logging.FileHandler(path)",
        "os.popen('cat x')",
        "subprocess.run(['cat', path])",
        "from subprocess import Popen",
        "asyncio.create_subprocess_exec('cat', path)",
        "o = os",
        "vars(os)",
        "import posix",
        "import pickle",
        "path.chmod(0o777)",
        "os.chown(path, 0, 0)",
        "path.rename(other)",
        "globals()['o' + 'pen']",
    ],
)
def test_every_spelling_is_found(text: str) -> None:
    assert list(_uses(list(ast.walk(ast.parse(text)))))


def test_a_snapshot_is_no_file() -> None:
    text = "def f(snapshot: 'Snapshot'):\n    return lambda path: snapshot.read_text(path)"
    assert not list(_uses(list(ast.walk(ast.parse(text)))))
