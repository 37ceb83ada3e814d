"""Runs inside a virtual host with an IOMMU: the doctor on real sysfs, config space and VFIO."""

import contextlib
import io
import json
import subprocess
import sys
from pathlib import Path

from tests.lab.inside import run_and_report, say, step

DEVICES = Path("/sys/bus/pci/devices")
DOMAIN = """<domain type='qemu'><name>vm</name><memory unit='MiB'>64</memory><vcpu>1</vcpu>
<os><type arch='x86_64' machine='q35'>hvm</type></os><devices>
<hostdev mode='subsystem' type='pci' managed='yes'><source>
<address domain='0x{0}' bus='0x{1}' slot='0x{2}' function='0x0'/></source></hostdev>
</devices></domain>"""


def outcome(*words: str) -> tuple[int, str]:
    """Exit code and output of a command, in this process; of an error its message."""
    from homenode.cli.main import run
    from homenode.errors import HomenodeError

    output = io.StringIO()
    with contextlib.redirect_stdout(output):
        try:
            run(words)
        except HomenodeError as error:
            return error.exit_code, str(error)
        except SystemExit as end:
            return int(str(end.code or 0)), output.getvalue()
    return 0, output.getvalue()


def retrain(name: str, *words: str) -> None:
    say(name, json.dumps(outcome("doctor", "retrain", *words)))
    step(name)


def give_to_vfio(bdf: str) -> None:
    (DEVICES / bdf / "driver_override").write_text("vfio-pci")
    Path("/sys/bus/pci/drivers_probe").write_text(bdf)


def hooked(operation: str, gpu: str) -> str:
    """What libvirt's hook would log for a domain that has the GPU."""
    from homenode.cli import retrain as command
    from homenode.cli.arguments.check import RetrainHookArguments

    domain, bus, slot = gpu.replace(".", ":").split(":")[:3]
    xml = DOMAIN.format(domain, bus, slot).encode()
    output, given = io.StringIO(), sys.stdin
    sys.stdin = io.TextIOWrapper(io.BytesIO(xml))
    try:
        with contextlib.redirect_stdout(output):
            command.hook(RetrainHookArguments(words=("vm", operation)))
    finally:
        sys.stdin = given
    return output.getvalue()


def main() -> None:
    subprocess.run(["modprobe", "vfio-pci"], check=True)
    host = json.loads(outcome("show", "--json")[1])
    devices = {device["bdf"]: device for device in host["pci_devices"]}
    nic = next(d for d in host["pci_devices"] if d["kind"] == "nic" and d["parent"])
    bdf, port = nic["bdf"], nic["parent"]
    say("devices", json.dumps([devices[port], nic]))
    before = (DEVICES / port / "config").read_bytes().hex()
    give_to_vfio(bdf)
    retrain("planned", bdf)
    retrain("applied", bdf, "--apply")
    retrain("above", bdf, "--target", "6", "--apply")
    guest = subprocess.Popen(
        [
            *"qemu-system-x86_64 -machine q35 -m 64 -S -nodefaults -display none -device".split(),
            *(f"vfio-pci,host={bdf}", "-qmp", "stdio"),
        ],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert guest.stdin is not None and guest.stdout is not None
    guest.stdout.readline()  # its greeting: the machine is made, and so is the device
    retrain("held", bdf, "--apply")
    guest.kill()
    guest.wait()
    retrain("released", bdf)
    gpu = next(d["bdf"] for d in host["pci_devices"] if d["kind"] == "gpu" and d["parent"])
    (DEVICES / gpu / "driver_override").write_text("vfio-pci")
    Path("/sys/bus/pci/drivers_probe").write_text(gpu)
    say("hook", json.dumps([gpu, hooked("start", gpu), hooked("started", gpu)]))
    step("hook")
    say("config", json.dumps([before, (DEVICES / port / "config").read_bytes().hex()]))
    say("doctor", json.dumps(outcome("doctor", "--json")))
    step("doctor")
    outcome("capture", "-o", "/tmp/host.tar.gz")
    say("expected", json.dumps(outcome("doctor", "--expect", "/tmp/host.tar.gz", "--json")))
    step("expect")


run_and_report(main)
