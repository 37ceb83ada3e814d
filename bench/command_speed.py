"""Speed of whole commands, from process start to their end, next to a bare interpreter's start.

`make bench`, or `bench/command_speed.py [ROUNDS]`. Each round runs every command once, in turn, so
that a busy moment of the machine falls on all of them; printed are medians and their multiples of
`python -c pass`.
"""

import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from msgspec.structs import replace
from tests.rendered.machine import render

from homenode.machine.description.parse import load_shipped
from homenode.machine.discover.lspci import overlay_lspci
from homenode.machine.snapshot.capture import capture

ROUNDS = 9
DOCUMENT = Path(__file__).parents[1] / "demo" / "gpu-vm.xml"
CAPTURED = (
    Path(__file__).resolve().parents[2] / "shared/machines/hwloc/AMD-19h-Zen4-2xEpyc-9654.xml"
)
LISTED = Path(__file__).resolve().parents[2] / "shared/machines/lspci/gpud-hgx-h100x8-lspci-vvv.txt"


def main() -> None:
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else ROUNDS
    host = str(CAPTURED) if CAPTURED.exists() else "epyc9654-2p-1node"
    with tempfile.TemporaryDirectory() as directory:
        plan = ["plan", str(DOCUMENT), "--layout", "pin-numa", "--vcpus", "64"]
        out = ["--output", str(Path(directory) / "out.xml"), "--quiet"]
        capture, devices = _large_capture(Path(directory) / "large.tar.gz")
        homenode = [sys.executable, "-m", "homenode.cli.main"]
        commands = {
            "python -c pass": [sys.executable, "-c", "pass"],
            "import homenode": [sys.executable, "-c", "import homenode"],
            "homenode --help": [*homenode, "--help"],
            "plan, 2x EPYC 9654, to written XML": [*homenode, *plan, "--host", host, *out],
            "plan, 8 nodes x 256 PUs, 64 GPUs": [
                *homenode,
                *plan,
                "--host",
                "x86-2p8n128c256t-64gpu",
                *out,
            ],
            f"doctor, capture of 256 PUs, {devices} functions": [
                *homenode,
                "doctor",
                str(DOCUMENT),
                "--host",
                capture,
            ],
        }
        in_use: dict[str, list[float]] = {name: [] for name in commands}
        for _ in range(rounds):
            for name, argv in commands.items():
                in_use[name].append(_seconds(argv))
    bare = statistics.median(in_use["python -c pass"])
    print(
        f"{'command':44} {'median s':>9} {'of bare':>8}   host of the first plan: {Path(host).name}"
    )
    for name, seconds in in_use.items():
        median = statistics.median(seconds)
        print(f"{name:44} {median:9.3f} {median / bare:8.1f}")


def _large_capture(out: Path) -> tuple[str, int]:
    """A capture of 256 PUs, with the functions of a captured HGX H100 where that is at hand."""
    described = load_shipped("x86-2p8n128c256t-64gpu")
    if LISTED.exists():
        bare = replace(described.host, pci_devices=(), root_complexes=(), links=())
        host = overlay_lspci(bare, LISTED.read_text())
        described = replace(described, host=host)
    out.write_bytes(capture(render(described)).content)
    return str(out), len(described.host.pci_devices)


def _seconds(argv: list[str]) -> float:
    """Wall time. A command that has findings exits with 1."""
    start = time.perf_counter()
    done = subprocess.run(argv, check=False, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    if done.returncode not in (0, 1):
        raise SystemExit(done.stderr.decode())
    return time.perf_counter() - start


if __name__ == "__main__":
    main()
