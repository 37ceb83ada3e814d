"""`bench --setup` with the real curl, git, CMake and make; stand-ins are the sources and compilers
of GPUs alone. The archives come over HTTPS, through a proxy."""

import gzip
import hashlib
import io
import os
import shutil
import signal
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from msgspec.structs import replace

from homenode.errors import ToolError
from homenode.measure.access.machine import LocalMachine
from homenode.measure.tool_setup import (
    NEEDED,
    SOURCES,
    SetupPlan,
    ToolSource,
    Vendor,
    carry_out,
    list_installed,
    setup_journal,
    setup_plan,
    take_back,
)
from homenode.process import run
from tests.https_proxy import certificate, proxy
from tests.processes import wait_for, wait_for_end, write_program

NEEDS = ("curl", "git", "cmake", "make", "c++", "openssl")
MISSING = [name for name in NEEDS if not shutil.which(name)]
pytestmark = pytest.mark.skipif(bool(MISSING), reason=f"not installed: {', '.join(MISSING)}")

PROGRAM = "#include <cstdio>\nint main() { std::puts(BUILT_FOR); }\n"
CMAKE = """cmake_minimum_required(VERSION 3.16)
project(tool LANGUAGES CXX)
add_executable({program} tool.cpp)
string(REPLACE ";" "+" names "${{{targets}}}")
target_compile_definitions({program} PRIVATE BUILT_FOR="${{names}}")
set_target_properties({program} PROPERTIES RUNTIME_OUTPUT_DIRECTORY ${{CMAKE_BINARY_DIR}})
"""
MAKE = """CUDA_HOME ?= /usr/local/cuda
build/all_reduce_perf: tool.cpp
\tmkdir -p build
\t$(CUDA_HOME)/bin/nvcc $(NVCC_GENCODE) '-DBUILT_FOR="$(NVCC_GENCODE)"' $< -o $@
"""
NVCC = """#!/bin/sh
for one; do shift; case $one in -gencode=*) ;; *) set -- "$@" "$one" ;; esac; done
exec c++ "$@"
"""


def carried_out(plan: SetupPlan) -> tuple[str, ...]:
    root = Path(plan.prefix).parent / "state"
    return carry_out(plan, LocalMachine(), root, lambda step: None)


def source(name: str) -> ToolSource:
    (found,) = (one for one in SOURCES if one.name == name)
    return found


def archive_of(directory: str, **files: str) -> bytes:
    """tool.cpp, and a makefile under its name, of CMake without the ending."""
    made = io.BytesIO()
    names = {"CMakeLists": "CMakeLists.txt"}
    with tarfile.open(fileobj=made, mode="w") as archive:
        for name, text in (*files.items(), ("tool.cpp", PROGRAM)):
            member = tarfile.TarInfo(f"{directory}/{names.get(name, name)}")
            member.size = len(text.encode())
            archive.addfile(member, io.BytesIO(text.encode()))
    return gzip.compress(made.getvalue(), mtime=0)


ARCHIVES = {
    "nvbandwidth": archive_of(
        "nvbandwidth-0.9",
        CMakeLists=CMAKE.format(program="nvbandwidth", targets="CMAKE_CUDA_ARCHITECTURES"),
    ),
    "nccl-tests": archive_of("nccl-tests-2.17.6", Makefile=MAKE),
}


@pytest.fixture
def cuda(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A CUDA and a ROCm that are not where makefiles look by themselves."""
    home = tmp_path / "cuda"
    (home / "bin").mkdir(parents=True)
    for name in ("nvcc", "hipcc"):
        write_program(home / "bin" / name, NVCC)
    monkeypatch.setenv("PATH", f"{home / 'bin'}:{os.environ['PATH']}")
    return home


@pytest.fixture
def asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """What the proxy was asked for."""
    both = certificate(tmp_path, "github.com")
    found: list[str] = []
    answers = {urlsplit(source(name).url).path: text for name, text in ARCHIVES.items()}
    with proxy(both, answers, found) as address:
        monkeypatch.setenv("https_proxy", address)
        monkeypatch.setenv("no_proxy", "")
        monkeypatch.setenv("CURL_CA_BUNDLE", str(tmp_path / "cert.pem"))
        yield found


def pinned(name: str) -> ToolSource:
    return replace(source(name), sha256=hashlib.sha256(ARCHIVES[name]).hexdigest())


def plan_of(prefix: Path, cuda: Path, *sources: ToolSource) -> SetupPlan:
    installed = LocalMachine().find_installed(NEEDED)
    vendor, names = sources[0].vendor, ("90", "120")
    if vendor is Vendor.AMD:
        names = ("gfx90a", "gfx942")
    return setup_plan(vendor, names, installed, str(prefix), sources, str(cuda))


def said(program: Path) -> str:
    return subprocess.run([program], capture_output=True, text=True, check=True).stdout.strip()


def test_archives_are_built_and_undone(cuda: Path, asked: list[str], tmp_path: Path) -> None:
    prefix = tmp_path / "prefix"
    plan = plan_of(prefix, cuda, pinned("nvbandwidth"), pinned("nccl-tests"))
    assert plan.lacks == ()
    programs = carried_out(plan)
    assert asked == ["CONNECT github.com:443 HTTP/1.1"] * 2
    assert said(prefix / "bin" / "nvbandwidth") == "90+120"
    assert "code=sm_120" in said(prefix / "bin" / "all_reduce_perf")
    assert sorted(Path(path).name for path in programs) == ["all_reduce_perf", "nvbandwidth"]
    assert len(take_back(prefix)) == 3  # two programs, and what they were built from
    assert list((prefix / "bin").iterdir()) == []


def test_what_a_server_lacks_is_reported(cuda: Path, asked: list[str], tmp_path: Path) -> None:
    gone = replace(pinned("nvbandwidth"), url="https://github.com/gone.tar.gz")
    with pytest.raises(ToolError, match=r"nvbandwidth: .*curl: exit status 22: .*404"):
        carried_out(plan_of(tmp_path / "prefix", cuda, gone))


def test_a_commit_is_built(cuda: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    served = tmp_path / "served" / "ROCm" / "rccl-tests.git"
    served.mkdir(parents=True)
    text = CMAKE.format(program="all_reduce_perf", targets="GPU_TARGETS")
    (served / "CMakeLists.txt").write_text(text)
    (served / "tool.cpp").write_text(PROGRAM)
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / ".gitconfig").write_text(
        f'[url "file://{tmp_path}/served/"]\n\tinsteadOf = https://github.com/\n'
        "[user]\n\tname = a\n\temail = a@example.org\n[uploadpack]\n\tallowAnySHA1InWant = true\n"
    )

    def git(*words: str) -> str:
        return run(("git", "-C", str(served), *words), 60).stdout_or_raise().strip()

    git("init", "--quiet")
    git("add", ".")
    git("commit", "--quiet", "-m", "the pinned one")
    commit = git("rev-parse", "HEAD")
    (served / "tool.cpp").write_text("#error the newest is not what was pinned\n")
    git("commit", "--quiet", "-a", "-m", "a later one")
    prefix = tmp_path / "prefix"
    plan = plan_of(prefix, cuda, replace(source("rccl-tests"), commit=commit))
    carried_out(plan)
    assert said(prefix / "bin" / "all_reduce_perf") == "gfx90a+gfx942"


CHILD = """
import sys
from pathlib import Path
from tests.measure.test_setup_real import carried_out, pinned, plan_of
prefix, cuda = map(Path, sys.argv[1:])
carried_out(plan_of(prefix, cuda, pinned("nccl-tests")))
"""


def test_a_killed_setup_is_done_by_the_next(cuda: Path, asked: list[str], tmp_path: Path) -> None:
    prefix, compiler = tmp_path / "prefix", cuda / "bin" / "nvcc"
    number = tmp_path / "number"
    half = f'#!/bin/sh\nfor to; do :; done\necho half >"$to"\necho $PPID >{number}.part\n'
    compiler.write_text(f"{half}mv {number}.part {number}\nexec sleep 600\n")
    child = subprocess.Popen(
        [sys.executable, "-c", CHILD, str(prefix), str(cuda)], cwd=Path(__file__).parents[2]
    )
    wait_for(lambda: number.exists() or child.poll() is not None)
    child.kill()
    child.wait()
    make = int(number.read_text())
    os.killpg(os.getpgid(make), signal.SIGKILL)  # what outlived it, as after a crash of the machine
    wait_for_end(make)
    assert list_installed(setup_journal(prefix)) == ()
    assert (prefix / "share/homenode/src/nccl-tests-2.17.6/build/all_reduce_perf").exists()
    compiler.write_text(NVCC)
    carried_out(plan_of(prefix, cuda, pinned("nccl-tests")))
    assert "code=sm_90" in said(prefix / "bin" / "all_reduce_perf")
    (entry,) = list_installed(setup_journal(prefix))
    assert entry.subject == f"{prefix}/bin/all_reduce_perf"
