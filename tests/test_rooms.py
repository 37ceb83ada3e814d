"""The rooms of the source: which package may import which."""

import ast
from collections.abc import Iterator
from pathlib import Path

from tests.source_trees import FILES, SOURCE, nodes

ROOMS: tuple[tuple[str, frozenset[str]], ...] = (
    ("cli", frozenset({"cli", "__main__"})),
    ("facade", frozenset({"api", ""})),
    ("show", frozenset({"report", "plan.words"})),
    ("cluster", frozenset({"pool", "pods", "kubevirt", "slurm", "measure.bindings"})),
    ("decide", frozenset({"evidence", "analyse", "auto_layout"})),
    ("measure", frozenset({"measure", "results"})),
    ("nccl", frozenset({"nccl"})),
    ("check", frozenset({"doctor", "verify", "watch"})),
    ("change", frozenset({"change", "apply", "host_setup", "record_folder"})),
    ("plan", frozenset({"plan", "tuning", "targets.vm_file"})),
    (
        "vm",
        frozenset(
            {"vm", "domain", "targets", "hypervisor", "sources"}
            | {"plan.model", "plan.options", "plan.gpu_parts", "plan.fingerprint"}
        ),
    ),
    (
        "machine",
        frozenset(
            {"discover", "snapshot", "description", "tools", "hosts"}
            | {"topology", "pci", "host_reserve"}
        ),
    ),
    (
        "leaves",
        frozenset(
            "units cpuset bdf indices errors gap formats json_text toml_text wording doc opt "
            "findings catalogue plugins objective metrics process ssh_options durable "
            "input_files package_files host_files trusted_path unit_rights".split()
        ),
    ),
)
"""Rooms from the top of the house to the ground, and what lives in each. A module belongs to the
longest name that it begins with. Imports, lazy ones too, go to the same room or one below."""

UPWARDS = {
    "analyse.study_maps -> measure.bindings.evidence",
    "analyse.study_maps -> measure.bindings.experiments",
    "analyse.study_outliers -> measure.bindings.evidence",
    "analyse.study_report -> measure.bindings.evidence",
    "analyse.study_report -> measure.bindings.experiments",
    "analyse.study_verdicts -> measure.bindings.evidence",
    "analyse.study_verdicts -> measure.bindings.experiments",
    "apply.live_pins -> verify.live.procfs",
    "doctor.collectives -> nccl.explanation",
    "doctor.collectives -> nccl.guest_tree",
    "doctor.links.load_program -> measure.access.local",
    "doctor.links.load_program -> measure.gpu.machine",
    "doctor.links.load_program -> measure.program_text",
    "nccl.memory -> evidence.model",
    "pool.answers_file -> ",
    "snapshot.capture -> ",
}
"""Those that still go up. None is added; what is mended goes from here."""

_FLOOR = {name: floor for floor, (_, names) in enumerate(ROOMS) for name in names}


def _module(path: Path) -> str:
    parts = path.relative_to(SOURCE).with_suffix("").parts
    return ".".join(part for part in parts if part != "__init__")


MODULES = {_module(path): path for path in FILES}


def _floor(module: str) -> int:
    parts = module.split(".")
    names = [".".join(parts[:length]) for length in range(len(parts), 0, -1)]
    found = next((name for name in names if name in _FLOOR), None)
    assert found is not None, f"{module}: in which room is it? See ROOMS"
    return _FLOOR[found]


def _imported(path: Path) -> Iterator[str]:
    """Modules of homenode that a file imports, inside functions too."""
    for node in nodes(path):
        if isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        else:
            continue
        for name in names:
            if name.partition(".")[0] == "homenode":
                inside = name.partition(".")[2]
                yield inside if inside in MODULES else inside.rpartition(".")[0]


def test_imports_go_down_or_stay_in_their_room() -> None:
    found = {
        f"{module} -> {other}"
        for module, path in MODULES.items()
        for other in _imported(path)
        if _floor(other) < _floor(module)
    }
    assert found - UPWARDS == set(), "an import goes up: see ROOMS"
    assert UPWARDS - found == set(), "mended: take it from UPWARDS"


def test_no_modules_import_each_other_in_a_circle() -> None:
    imports = {
        module: sorted({other for other in _imported(path) if other != module})
        for module, path in MODULES.items()
    }
    done: set[str] = set()
    for start in sorted(imports):
        stack = [(start, iter(imports[start]))]
        way = [start]
        while stack:
            module, rest = stack[-1]
            following = next((other for other in rest if other not in done), None)
            if following is None:
                done.add(module)
                stack.pop()
                way.pop()
                continue
            assert following not in way, (
                f"{' -> '.join(way[way.index(following) :])} -> {following}"
            )
            way.append(following)
            stack.append((following, iter(imports[following])))


def test_every_module_has_a_room_and_no_name_of_a_room_is_left_over() -> None:
    for module in MODULES:
        _floor(module)
    packages = {".".join(parts[:n]) for m in MODULES for parts in [m.split(".")] for n in (1, 2)}
    data = {"hosts"}
    assert {name for _, names in ROOMS for name in names} <= packages | data | {""}
