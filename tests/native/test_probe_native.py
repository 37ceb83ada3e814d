"""The probe's own unit tests, its sanitized and static builds, and the probe as a guest's init."""

import gzip
import json
import platform
import shutil
import subprocess
from pathlib import Path

import pytest

from homenode.check.verify.boot.stand_in_boot import build_kernel_command
from homenode.machine.tools.homenode_probe import parse
from homenode.measure.probe_samples import read_probe_results
from tests.probe_build import FEW_BYTES, OUT, ROOT, make, one_pu, run
from tests.verify_guests import guest_files

NATIVE = ROOT / "native"
SOURCES = (NATIVE / "sources.txt").read_text().split()


def test_the_list_of_sources_names_every_file_once() -> None:
    found = sorted(f"src/{path.name}" for path in (NATIVE / "src").glob("*.cpp"))
    assert found == SOURCES


@pytest.mark.parametrize("path", sorted(NATIVE.rglob("*.[ch]pp")), ids=lambda path: path.name)
def test_each_native_file_opens_with_what_is_timed_and_stays_short(path: Path) -> None:
    lines = path.read_text().splitlines()
    assert lines[0].startswith("// ")
    assert len(lines) <= 400
    head = "\n".join(lines[:16]).lower()
    if path.parent.name == "src":
        assert "timed" in head or "timing" in head, f"{path}: does not say what is timed"


def test_the_unit_tests_pass() -> None:
    answer = run(make("probe-unit-tests-plain"))
    assert answer.code == 0, answer.errors
    assert answer.text.endswith(" 0 failed\n")


@pytest.mark.lab
def test_the_unit_tests_pass_under_the_sanitizers() -> None:
    answer = run(make("probe-unit-tests"))
    assert answer.code == 0, answer.errors


def test_a_static_build_needs_no_library() -> None:
    path = make("homenode-probe-static")
    assert run(path, "bandwidth", "--pus", one_pu(), *FEW_BYTES).document["runs"]
    if shutil.which("ldd"):
        assert "not a dynamic executable" in run(Path("/usr/bin/ldd"), str(path)).errors


@pytest.mark.lab
def test_cmake_builds_the_same_program(tmp_path: Path) -> None:
    if shutil.which("cmake") is None:
        pytest.skip("needs cmake")
    for command in (
        ["cmake", "-S", str(NATIVE), "-B", str(tmp_path), "-DHOMENODE_WERROR=ON"],
        ["cmake", "--build", str(tmp_path), "--target", "homenode-probe", "-j", "2"],
    ):
        subprocess.run(command, check=True, capture_output=True, timeout=600)
    assert run(tmp_path / "homenode-probe", "--version").code == 0


@pytest.mark.lab
def test_it_builds_and_computes_right_for_aarch64() -> None:
    compiler, emulator = "aarch64-linux-gnu-g++", shutil.which("qemu-aarch64-static")
    if shutil.which(compiler) is None:
        pytest.skip(f"needs {compiler}")
    variables = (f"OUT={OUT / 'aarch64'}", f"CXX={compiler}")
    path = make("aarch64/homenode-probe-static", *variables)
    if emulator is None:
        pytest.skip("built, but needs qemu-aarch64-static to run it")
    answer = run(Path(emulator), str(path), "bandwidth", "--pus", one_pu(), *FEW_BYTES)
    assert answer.document["instruction_set"] == "neon"


def initrd_of(program: bytes) -> bytes:
    """A cpio archive (newc) with one executable, /init."""

    def entry(name: str, mode: int, data: bytes) -> bytes:
        fields = (0, mode, 0, 0, 1, 0, len(data), 0, 0, 0, 0, len(name) + 1, 0)
        head = "070701" + "".join(f"{field:08x}" for field in fields) + name + "\0"
        padded = head.encode() + b"\0" * (-len(head) % 4)
        return padded + data + b"\0" * (-len(data) % 4)

    return gzip.compress(
        entry("init", 0o100755, program) + entry("TRAILER!!!", 0, b""), compresslevel=1
    )


@pytest.mark.nightly
@pytest.mark.qemu
def test_as_init_of_a_guest_with_two_nodes_every_page_of_every_cell_is_on_its_node(
    tmp_path: Path,
) -> None:
    if platform.machine() != "x86_64":
        pytest.skip("needs x86-64")
    kernel = guest_files().kernel
    program = make("homenode-probe-static")
    initrd = tmp_path / "initrd.gz"
    initrd.write_bytes(initrd_of(program.read_bytes()))
    arguments = "bandwidth --matrix --kernels read,triad " + " ".join(FEW_BYTES)
    words = (
        "qemu-system-x86_64 -machine q35 -accel tcg,thread=single -cpu max -m 768 "
        "-smp 4,sockets=2,cores=2 -nodefaults -display none -no-reboot"
    )
    command = words.split()
    for node, cpus in ((0, "0-1"), (1, "2-3")):
        command += ["-object", f"memory-backend-ram,id=m{node},size=384M"]
        command += ["-numa", f"node,nodeid={node},cpus={cpus},memdev=m{node}"]
    command += ["-kernel", str(kernel), "-initrd", str(initrd), "-serial", "stdio"]
    kernel_words = build_kernel_command(4, kvm=False).replace(
        " nokaslr", ""
    )  # which init would be given
    command += ["-append", f"{kernel_words} -- {arguments}"]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=1200, check=False, stdin=subprocess.DEVNULL
    )
    start, end = done.stdout.find("{"), done.stdout.rfind("}")
    assert start >= 0, done.stdout + done.stderr
    document = json.loads(done.stdout[start : end + 1])
    assert "emulated" in {caveat["id"] for caveat in document["caveats"]}
    cells = [(cell["pus"], cell["node"]) for cell in document["runs"]]
    assert cells == [("0-1", 0), ("0-1", 1), ("2-3", 0), ("2-3", 1)]
    for cell in document["runs"]:
        assert set(cell["pages"]["pages_of_node"]) == {str(cell["node"])}
        assert cell["pages"]["pages_unknown"] == 0
        assert cell["pages"]["verified_by"] == "move_pages"
    read = read_probe_results(parse(done.stdout[start : end + 1]))
    assert read.emulated, "a run of the suite there is marked, and nothing is concluded from it"
    places = {(one.sample.node, one.sample.peer_node) for one in read.placed}
    assert places == {(0, 0), (0, 1), (1, 0), (1, 1)}
