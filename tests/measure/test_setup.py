"""Building pinned GPU tools: planned, printed, carried out with stand-ins, undone."""

import hashlib
import re
import shlex
import shutil
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest
from msgspec.structs import replace

from homenode.change.journal import ChangeEntry, ChangeState
from homenode.errors import HomenodeError, HostError, InputError, ToolError, UsageError
from homenode.machine.tools.gpu_architectures import parse_amd, parse_nvidia
from homenode.measure.access.machine import LocalMachine
from homenode.measure.tool_setup import (
    NEEDED,
    SOURCES,
    TORCH_PYTHON,
    SetupPlan,
    SetupStep,
    ToolSource,
    Vendor,
    carry_out,
    list_installed,
    setup_journal,
    setup_journals,
    setup_plan,
    take_back,
)
from tests.command_line import homenode
from tests.mutations import MUTATIONS, survives
from tests.processes import write_program


@pytest.fixture
def tools(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Stand-ins for the network, the compilers and a driver; sha256sum and tar are real."""
    directory = tmp_path / "tools"
    archive = tmp_path / "archive.tar.gz"
    inside = tmp_path / "nvbandwidth-0.9"
    inside.mkdir()
    (inside / "CMakeLists.txt").write_text("")
    with tarfile.open(archive, "w:gz") as packed:
        packed.add(inside, "nvbandwidth-0.9")
    made = 'echo "#!/bin/true" > "$2/nvbandwidth"'
    for name, text in (
        ("nvidia-smi", "echo 9.0; echo 9.0"),
        ("nvcc", "exit 0"),
        ("curl", f'while [ "$1" != --output ]; do shift; done; cp {archive} "$2"'),
        ("cmake", f'if [ "$1" = --build ]; then {made}; else mkdir -p "$4"; fi'),
        ("c++", "exit 0"),
    ):
        write_program(directory / name, f"#!/bin/sh\n{text}\n")
    monkeypatch.setenv("PATH", f"{directory}:/usr/bin:/bin")
    return directory


def carried_out(
    plan: SetupPlan, notify: Callable[[SetupStep], None] = lambda step: None
) -> tuple[str, ...]:
    return carry_out(plan, LocalMachine(), Path(plan.prefix).parent / "state", notify)


def source_of(tools: Path) -> ToolSource:
    """nvbandwidth, with the sum of the stand-in's archive."""
    (source,) = (one for one in SOURCES if one.name == "nvbandwidth")
    content = (tools.parent / "archive.tar.gz").read_bytes()
    return replace(source, sha256=hashlib.sha256(content).hexdigest())


def plan_of(tools: Path, prefix: Path) -> SetupPlan:
    installed = LocalMachine().find_installed(NEEDED)
    return setup_plan(Vendor.NVIDIA, ("90",), installed, str(prefix), (source_of(tools),))


def test_every_source_is_pinned() -> None:
    for source in SOURCES:
        if source.name == "PyTorch":
            assert source.url.startswith("https://download.pytorch.org/whl/")
            continue
        assert (source.sha256 is None) != (source.commit is None)
        pin = source.sha256 or source.commit or ""
        assert len(pin) in (40, 64)
        assert set(pin) <= set("0123456789abcdef")
        assert source.url.startswith("https://github.com/")


def test_a_plan_builds_for_the_gpus_own_architecture() -> None:
    plan = setup_plan(Vendor.NVIDIA, ("90", "120"), NEEDED, "/opt/tools")
    lines = [shlex.join(step.argv) for step in plan.steps]
    assert any("-DCMAKE_CUDA_ARCHITECTURES=90;120" in line for line in lines)
    assert any("arch=compute_120,code=sm_120" in line for line in lines)
    programs = ("nvbandwidth", "all_reduce_perf", TORCH_PYTHON)
    assert plan.installs == tuple(f"/opt/tools/bin/{one}" for one in programs)
    amd = setup_plan(Vendor.AMD, ("gfx942",), NEEDED, "/opt/tools")
    assert any("-DGPU_TARGETS=gfx942" in shlex.join(step.argv) for step in amd.steps)


def test_nccl_tests_are_built_with_the_cuda_whose_compiler_is_found() -> None:
    def make(home: str | None) -> str:
        plan = setup_plan(Vendor.NVIDIA, ("90",), NEEDED, "/opt/tools", SOURCES, home)
        return next(shlex.join(step.argv) for step in plan.steps if step.argv[0] == "make")

    assert make("/apps/cuda-12.8").endswith("CUDA_HOME=/apps/cuda-12.8")
    assert "CUDA_HOME" not in make(None)
    assert "CUDA_HOME" not in make("/apps/$(shell id)")


def test_archives_are_checked_before_they_are_unpacked() -> None:
    steps = setup_plan(Vendor.NVIDIA, ("90",), NEEDED, "/opt/tools").steps
    for tool in ("nvbandwidth", "nccl-tests"):
        words = [step.argv[0] for step in steps if step.tool == tool]
        assert words.index("sha256sum") < words.index("tar")


def test_what_a_build_lacks_is_named_and_what_is_there_is_left() -> None:
    there = {"nvbandwidth", TORCH_PYTHON}
    plan = setup_plan(Vendor.NVIDIA, ("90",), NEEDED - {"nvcc"} | there, "/opt/tools")
    assert plan.steps == ()
    assert plan.present == ("nvbandwidth", TORCH_PYTHON)
    assert plan.lacks == (
        "nccl-tests: needs nvcc (packages: make g++ libnccl-dev, CUDA with its bin on PATH)",
    )


@pytest.mark.parametrize("prefix", ["tools", "/opt/$HOME", "/opt/a b", "/opt/../etc", "/opt/a;b"])
def test_a_prefix_that_build_systems_take_apart_is_refused(prefix: str) -> None:
    with pytest.raises(UsageError, match="an absolute path of letters"):
        setup_plan(Vendor.NVIDIA, ("90",), NEEDED, prefix)


def test_a_dry_run_prints_the_commands_and_runs_none(tools: Path, tmp_path: Path) -> None:
    prefix = tmp_path / "prefix"
    done = homenode("bench", "setup", "--prefix", str(prefix))
    assert done.exit_code == 0, done.output
    assert "-DCMAKE_CUDA_ARCHITECTURES=90" in done.stdout
    assert "| sha256sum --check --strict" in done.stdout
    assert not prefix.exists()


def test_applied_it_installs_records_and_is_undone(tools: Path, tmp_path: Path) -> None:
    prefix = tmp_path / "prefix"
    plan = plan_of(tools, prefix)
    stated: list[str] = []
    programs = carried_out(plan, lambda step: stated.append(step.argv[0]))
    program = prefix / "bin" / "nvbandwidth"
    assert program.read_text() == "#!/bin/true\n"
    assert programs == (str(program),)
    (journal,) = setup_journals(tmp_path / "state")
    (entry,) = list_installed(journal)
    assert stated == [line.split()[0] for line in entry.facts["commands"].splitlines()]
    assert carried_out(plan) == programs
    assert len(list_installed(journal)) == 1
    assert take_back(prefix) == (str(program), str(prefix / "share/homenode/src"))
    assert not program.exists()
    with pytest.raises(HostError, match="no record of a setup"):
        take_back(prefix)


def test_programs_of_others_stay_as_they_are(tools: Path, tmp_path: Path) -> None:
    prefix = tmp_path / "prefix"
    program = prefix / "bin" / "nvbandwidth"
    program.parent.mkdir(parents=True)
    program.write_text("mine")
    with pytest.raises(HostError, match="not one that homenode installed"):
        carried_out(plan_of(tools, prefix))
    program.unlink()
    carried_out(plan_of(tools, prefix))
    program.write_text("changed")
    with pytest.raises(HostError, match="expected it as"):
        take_back(prefix)
    assert program.read_text() == "changed"


def test_a_fetch_goes_through_the_users_proxy_and_nothing_else_does(
    tools: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("https_proxy", "http://me:secret@proxy:3128")
    said = tmp_path / "said"
    for name in ("curl", "cmake"):
        with (tools / name).open("a") as program:
            program.write(f"\necho {name} $https_proxy >>{said}\n")
    prefix = tmp_path / "prefix"
    carried_out(plan_of(tools, prefix))
    assert said.read_text().splitlines() == ["curl http://me:secret@proxy:3128", "cmake", "cmake"]
    assert "secret" not in setup_journal(prefix).files.journal_path.read_text()


def test_a_part_of_a_program_does_not_stand_in_the_way(tools: Path, tmp_path: Path) -> None:
    """A disk that fills up while a program is put in its place."""
    half = '#!/bin/sh\nfor to; do :; done; echo half > "$to"; exit 1\n'
    write_program(tools / "install", half)
    prefix = tmp_path / "prefix"
    with pytest.raises(ToolError, match="install"):
        carried_out(plan_of(tools, prefix))
    assert not (prefix / "bin/nvbandwidth").exists()
    (tools / "install").unlink()
    carried_out(plan_of(tools, prefix))
    assert [path.name for path in (prefix / "bin").iterdir()] == ["nvbandwidth"]


def test_a_full_disk_is_reported_whatever_the_tool_says(
    tools: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    failing = "#!/bin/sh\necho 'The C++ compiler is not able to compile' >&2; exit 1\n"
    write_program(tools / "cmake", failing)
    prefix = tmp_path / "prefix"
    for left, says in ((1000, r"\(.*prefix: 1000 bytes left on its disk\)"), (1 << 40, "compile$")):
        usage = shutil.disk_usage("/")._replace(free=left)
        monkeypatch.setattr(shutil, "disk_usage", lambda path, usage=usage: usage)
        with pytest.raises(ToolError) as raised:
            carried_out(plan_of(tools, prefix))
        assert re.search(says, raised.value.message)


def test_an_archive_with_another_sum_is_not_unpacked(tools: Path, tmp_path: Path) -> None:
    (source,) = (one for one in SOURCES if one.name == "nvbandwidth")
    prefix = tmp_path / "prefix"
    plan = setup_plan(
        Vendor.NVIDIA, ("90",), LocalMachine().find_installed(NEEDED), str(prefix), (source,)
    )
    with pytest.raises(ToolError, match=r"nvbandwidth: .*checksum did NOT match"):
        carried_out(plan)
    assert not (prefix / "share/homenode/src/nvbandwidth-0.9").exists()
    assert list_installed(setup_journal(prefix)) == ()
    # What the build that failed has left is removed as well, and only once.
    removed = homenode("bench", "setup", "--prefix", str(prefix), "--remove")
    assert removed.exit_code == 0 and f"removed {prefix}/share/homenode/src" in removed.output
    left = [path.name for path in (prefix / "share/homenode").iterdir()]
    assert not [name for name in left if name == "src" or name.endswith(".part")]
    with pytest.raises(HostError, match="no record of a setup"):
        take_back(prefix)


@pytest.mark.parametrize(
    "path", ["bin/../../etc/passwd", "/etc/passwd", "bin/..", "share/x", "bin"]
)
def test_a_record_that_names_files_elsewhere_is_refused(path: str, tmp_path: Path) -> None:
    done = ChangeEntry(what=ChangeState.DONE, kind="program", subject=str(tmp_path / path))
    setup_journal(tmp_path).write(done)
    with pytest.raises(InputError, match="expected programs below bin"):
        take_back(tmp_path)


def test_without_a_driver_nothing_is_built(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_program(tmp_path / "tools/nvidia-smi", "#!/bin/sh\necho broken >&2; exit 9\n")
    write_program(tmp_path / "tools/rocminfo", "#!/bin/sh\nexit 1\n")
    monkeypatch.setenv("PATH", f"{tmp_path / 'tools'}:/usr/bin:/bin")
    done = homenode("bench", "setup")
    assert isinstance(done.exception, HostError)
    assert "exit status 9: broken" in str(done.exception)


def test_damaged_answers_of_drivers_give_architectures_or_a_parse_error() -> None:
    survives(parse_nvidia, "9.0\n9.0\n12.0\n", MUTATIONS)
    text = "  Name:                    AMD EPYC\n  Name:                    gfx942\n"
    survives(parse_amd, text, MUTATIONS)


def test_pytorch_for_an_absent_amd_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """gfx950 needs ROCm 7; no driver is asked."""
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    done = homenode("bench", "setup", "--architecture", "gfx950", "--prefix", str(tmp_path / "p"))
    assert done.exit_code == 0, done.output
    (pip,) = (line for line in done.stdout.splitlines() if "/bin/pip install" in line)
    words = shlex.split(pip)
    assert words[words.index("--index-url") + 1].endswith("/whl/rocm7.1")
    assert "torch==2.10.0" in words
    assert not (tmp_path / "p").exists()
    refused = homenode("bench", "setup", "--architecture", "gfx950,90")
    assert isinstance(refused.exception, HomenodeError)


@pytest.mark.nightly  # five seconds, and the plan's steps are compared above
def test_pytorch_is_installed_on_its_own_and_undone(tools: Path, tmp_path: Path) -> None:
    """The environment and the launcher are real; only the wheels' index is a stand-in."""
    prefix = tmp_path / "prefix"
    sources = tuple(one for one in SOURCES if (one.name, one.vendor) == ("PyTorch", Vendor.NVIDIA))
    installed_here = LocalMachine().find_installed(NEEDED)
    plan = setup_plan(Vendor.NVIDIA, ("90",), installed_here, str(prefix), sources)
    steps = [one if not one.fetches else replace(one, argv=("true",)) for one in plan.steps]
    assert sum(one.fetches for one in plan.steps) == 1
    (program,) = carried_out(replace(plan, steps=tuple(steps)))
    said = LocalMachine().run((program, "-c", "import sys; print(sys.prefix)"), 60)
    assert said.stdout.strip() == str(prefix / "share/homenode/src/torch-2.10.0")
    assert take_back(prefix)[0] == program
    assert not Path(program).exists()


def test_a_prefix_that_cannot_be_written_is_reported(tools: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(HomenodeError, match="Not a directory"):
        carried_out(plan_of(tools, tmp_path / "file" / "prefix"))
