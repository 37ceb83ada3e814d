"""Boots a virtual host with homenode in it, and gives what its console said."""

import contextlib
import functools
import importlib.metadata
import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest

from homenode.machine.topology import Host
from homenode.vm.sources import load_host
from tests.lab.virtual_host import VirtualHost, virtual_host

HERE = Path(__file__).parent
SOURCE = HERE.parents[1] / "src"

TRIES = 3
START_S = 300.0
"""Until a machine's program begins, which is after some 10 s where nothing else runs."""
_NOTHING: Mapping[str, bytes] = MappingProxyType({})


def lab_directory() -> Path:
    """Where build-image puts image and kernel."""
    named = os.environ.get("HOMENODE_LAB")
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return Path(named) if named else cache / "homenode/lab"


def need_lab() -> Path:
    """The directory; skips the test where something is missing."""
    for program in ("qemu-system-x86_64", "mkfs.ext4"):
        if shutil.which(program, path=f"{os.environ['PATH']}:/usr/sbin:/sbin") is None:
            pytest.skip(f"no {program} here: apt-get install qemu-system-x86 e2fsprogs")
    directory = lab_directory()
    if not (directory / "recipe").exists():
        pytest.skip(f"no image in {directory}: run tests/lab/build-image (root, once)")
    inside = (directory / "python").read_text().strip()
    here = f"{sys.version_info.major}.{sys.version_info.minor}"
    if inside != here:
        pytest.skip(f"the image has Python {inside}, the installed packages are for {here}")
    return directory


@dataclass(frozen=True, slots=True)
class BootOutcome:
    """What a virtual host said."""

    console: str

    def result(self, name: str) -> str:
        """What the program inside reported under a name."""
        # A progress line that was just erased leaves its control sequences before the report.
        pattern = rf"^(?:\x1b\[[0-9;?]*[A-Za-z])*@@{re.escape(name)} (.*?)\r?$"
        match = re.search(pattern, self.console, re.MULTILINE)
        assert match is not None, f"no @@{name} in:\n{self.console[-6000:]}"
        return match[1]

    def report(self, name: str) -> Any:
        """What it reported as JSON."""
        return json.loads(self.result(name))


def boot(
    machine: VirtualHost,
    program: str,
    work: Path,
    *,
    kernel_words: str = "",
    files: Mapping[str, bytes] = _NOTHING,
    timeout_s: float,
) -> BootOutcome:
    """Boots the machine, runs a module of tests.lab in it with homenode, and powers off.

    files: by name, for /payload/files of the machine. A machine that does not end in time is booted
    once more: with threads of its own for each vCPU an emulated one may stop in its own boot where
    the host has fewer CPUs and others use them. What it said is printed.
    """
    lab = need_lab()
    image = payload(program, work, files)
    argv = (
        "qemu-system-x86_64",
        *machine.arguments,
        *("-accel", "tcg,thread=single,tb-size=512"),
        *("-drive", f"file={lab}/root.ext4,format=raw,if=none,id=root,snapshot=on"),
        *("-device", "nvme,drive=root,serial=root,bus=pcie.0,addr=0x1d"),
        *("-drive", f"file={image},format=raw,if=none,id=payload,readonly=on"),
        *("-device", "nvme,drive=payload,serial=payload,bus=pcie.0,addr=0x1e"),
        *("-kernel", str(lab / "vmlinuz")),
        # Kernel page-table isolation costs half the time here: each system call empties QEMU's TLB.
        # On a busy machine ticks come too late for the check of the timer, which then panics.
        "-append",
        "console=ttyS0 quiet panic=-1 mitigations=off nowatchdog no_timer_check "
        f"root=/dev/nvme0n1 rw init=/sbin/homenode-init {kernel_words}",
        *"-nodefaults -no-user-config -display none -serial stdio -no-reboot".split(),
    )
    console = work / "console"
    for attempt in range(1, TRIES + 1):
        seconds = run_to_its_end(argv, console, timeout_s)
        text = console.read_text(errors="replace")
        if seconds is not None:
            print(f"{text}\n{seconds:.0f} s")
            done = BootOutcome(text)
            done.result("DONE")
            return done
        print(
            f"try {attempt}: the virtual host did not begin within {START_S:g} s or end within "
            f"{timeout_s:g} s:\n{text[-6000:]}"
        )
    pytest.fail(f"the virtual host did not end within {timeout_s:g} s, {TRIES} times")


def boot_with_iommu(
    program: str,
    work: Path,
    host: str = "small-2n8c-2gpu",
    files: Mapping[str, bytes] = _NOTHING,
    timeout_s: float = 560,
) -> BootOutcome:
    machine = virtual_host(load_host(host), node_mib=1024, iommu=True)
    words = "intel_iommu=on"
    return boot(machine, program, work, kernel_words=words, files=files, timeout_s=timeout_s)


@functools.cache
def two_nodes(directory: Path) -> tuple[Host, BootOutcome]:
    """A machine of two nodes, and what it said of itself and of two VMs in it: booted once."""
    host = load_host("small-2n8c-2gpu")
    work = directory / "two-nodes"
    work.mkdir()
    machine = virtual_host(host, node_mib=1024)
    return host, boot(machine, "program_two_domains", work, timeout_s=1800)


def run_to_its_end(argv: Sequence[str], console: Path, timeout_s: float) -> float | None:
    """The seconds that a machine took; None where it did not end in time, or its program had not
    begun after START_S, and it was killed."""
    started = time.monotonic()
    with console.open("wb") as file:
        process = subprocess.Popen(
            argv, stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT
        )
        try:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(min(START_S, timeout_s))
            if process.poll() is None and b"@@" not in console.read_bytes():
                return None
            process.wait(max(0.0, timeout_s - (time.monotonic() - started)))
        except subprocess.TimeoutExpired:
            return None
        finally:
            process.kill()
            process.wait()
    return time.monotonic() - started


def payload(program: str, work: Path, files: Mapping[str, bytes]) -> Path:
    """An ext4 image with homenode, the packages it needs, and a module of tests.lab to run."""
    directory = work / "payload"
    site = directory / "site"
    site.mkdir(parents=True)
    (directory / "files").mkdir()
    for name, content in files.items():
        (directory / "files" / name).write_bytes(content)
    skip = shutil.ignore_patterns("*.pyi", "*.so.dbg")
    shutil.copytree(SOURCE / "homenode", site / "homenode", ignore=skip)
    for name in _needed():
        for path in _top_level(name):
            if path.is_dir():
                shutil.copytree(path, site / path.name, ignore=skip, dirs_exist_ok=True)
            else:
                shutil.copy2(path, site / path.name)
    shutil.copytree(HERE, site / "tests/lab")
    shutil.copy2(HERE.parent / "__init__.py", site / "tests/__init__.py")
    # Compiling each module again takes minutes under emulation, and nothing can be written there.
    subprocess.run(
        [sys.executable, "-m", "compileall", "-q", "--invalidation-mode", "unchecked-hash", site],
        check=True,
    )
    (directory / "run").write_text(
        f"PYTHONPATH=/payload/site exec python3 -B -m tests.lab.{program}\n"
    )
    image = work / "payload.ext4"
    size_mib = sum(p.stat().st_size for p in directory.rglob("*") if p.is_file()) // (1 << 20) + 48
    with image.open("wb") as file:
        file.truncate(size_mib << 20)
    environment = {**os.environ, "PATH": f"{os.environ['PATH']}:/usr/sbin:/sbin"}
    subprocess.run(
        ["mkfs.ext4", "-q", "-F", "-O", "^has_journal", "-d", directory, image],
        check=True,
        env=environment,
    )
    return image


def _needed() -> list[str]:
    """Distributions that homenode's own requirements lead to."""
    found: list[str] = []
    new = ["lxml", "msgspec", "rich"]
    while new:
        name = new.pop()
        if name in found:
            continue
        found.append(name)
        for requirement in importlib.metadata.requires(name) or ():
            words = re.match(r"[A-Za-z0-9._-]+", requirement)
            if words is not None and "extra ==" not in requirement:
                try:
                    importlib.metadata.distribution(words[0])
                except importlib.metadata.PackageNotFoundError:
                    continue  # of another Python or platform
                new.append(words[0])
    return found


def _top_level(name: str) -> list[Path]:
    distribution = importlib.metadata.distribution(name)
    files = distribution.files or ()
    tops = {str(file).split("/")[0] for file in files if not str(file).startswith("..")}
    places = (Path(str(distribution.locate_file(top))) for top in sorted(tops - {"__pycache__"}))
    return [place for place in places if place.exists() and "dist-info" not in place.name]
