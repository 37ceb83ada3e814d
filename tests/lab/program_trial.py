"""Runs inside a virtual host with an IOMMU: a trial of a VM that has a disk of each node."""

import json
import os
import subprocess
import threading
from pathlib import Path
from typing import Any

from tests.lab.inside import (
    bound_memory,
    homenode,
    homenode_ended,
    hostdevs,
    process_of,
    run_and_report,
    say,
    start_libvirtd,
    step,
    threads,
    virsh,
)
from tests.lab.serial_agent import CHANNEL, agent_virsh

FILES = Path("/payload/files")

# No login, no modules, no self-tests, and one processor until init: all of it is emulated twice, a
# hundred times slower. The model is Intel's because its guests trust the time stamp counter: others
# spend their time on asking the HPET.
DOMAIN = f"""<domain type='qemu'>
  <name>{{name}}</name>
  <memory unit='MiB'>192</memory>
  <vcpu>2</vcpu>
  <os>
    <type arch='x86_64' machine='q35'>hvm</type>
    <kernel>{FILES}/kernel</kernel>
    <initrd>{FILES}/initrd</initrd>
    <cmdline>console=ttyS0 quiet mitigations=off nowatchdog no_timer_check tsc=reliable rodata=off
 cryptomgr.notests lsm=capability maxcpus=1</cmdline>
  </os>
  <features><acpi/><apic/></features>
  <cpu mode='custom' match='exact' check='none'><model>Nehalem</model></cpu>
  <on_poweroff>destroy</on_poweroff>
  <on_reboot>destroy</on_reboot>
  <on_crash>destroy</on_crash>
  <devices>
    <emulator>/usr/bin/qemu-system-x86_64</emulator>
    <controller type='usb' model='none'/>
    <controller type='pci' index='0' model='pcie-root'/>
    <serial type='pty'><log file='/tmp/{{name}}.console' append='on'/><target port='0'/></serial>
    {{agent}}
    {{devices}}
    <memballoon model='none'/>
  </devices>
</domain>
"""
LAYOUT = "pin-numa-pci"
AGENT = Path("/tmp/vm.agent")
LOOK_S = 10.0


class Watch(threading.Thread):
    """Looks at a running VM from outside, without homenode; keeps the last look."""

    def __init__(self, name: str, disks: list[str]) -> None:
        super().__init__(daemon=True)
        self._name = name
        self._disks = disks
        self._ended = threading.Event()
        self._seen: Any = None

    def run(self) -> None:
        while not self._ended.wait(LOOK_S):
            try:
                pid = process_of(self._name)
                now = {
                    "drivers": drivers(self._disks),
                    "threads": threads(pid),
                    "memory": bound_memory(pid),
                }
            except OSError:  # it does not run
                continue
            if "CPU 0/TCG" in now["threads"] and now["memory"]:  # it has not begun to end
                self._seen = now

    def ended(self) -> Any:
        self._ended.set()
        self.join()
        return self._seen


def drivers(disks: list[str]) -> dict[str, str]:
    """The driver of each function, "" for none."""
    places = {disk: Path(f"/sys/bus/pci/devices/{disk}/driver") for disk in disks}
    return {disk: at.resolve().name if at.exists() else "" for disk, at in places.items()}


def lines(path: Path) -> list[Any]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def definition(name: str) -> str:
    return virsh("dumpxml", "--inactive", "--security-info", name)


def define(name: str, disks: list[str]) -> None:
    devices = hostdevs(disks)
    document = Path(f"/tmp/{name}.xml")
    document.write_text(
        DOMAIN.format(name=name, devices=devices, agent=CHANNEL.format(socket=AGENT))
    )
    virsh("define", str(document))
    # From its own print, in which what libvirt added stands in its order.
    document.write_text(definition(name))
    virsh("define", str(document))


def trial(name: str, disks: list[str], *options: str) -> None:
    define(name, disks)
    before, drivers_before = definition(name), drivers(disks)
    watch = Watch(name, disks)
    watch.start()
    step(f"{name} defined")
    results = Path(f"/tmp/{name}-results")
    words = (
        f"trial {name} --layouts {LAYOUT} --boots 1 --in-place --yes --guest-access agent "
        f"--tests cpu-single --quick --repeat 1 --probe {FILES}/probe --boot-timeout 1500 "
        f"--shutdown-timeout 60 --name {name} --results {results} --host-reserve memory=64MiB"
    )
    code, said = homenode_ended(*words.split(), *options)
    print(said, flush=True)
    step(f"{name} tried")
    report = {
        "code": code,
        "said": said,
        "definitions": [before, definition(name)],
        "drivers": [drivers_before, drivers(disks)],
        "running": virsh("list", "--name").split(),
        "watched": watch.ended(),
        "nodes": {
            disk: int(Path(f"/sys/bus/pci/devices/{disk}/numa_node").read_text()) for disk in disks
        },
        "journal": lines(Path(f"/var/lib/homenode/trials/{name}/journal.jsonl")),
        "changes": lines(Path(f"/var/lib/homenode/trials/{name}/changes.jsonl")),
    }
    for run in results.glob(f"*/{name}-{LAYOUT}-1"):
        report["plan"] = json.loads((run / "plan.json").read_text())
        report["results"] = lines(run / "results.jsonl")
        guest = next(run.glob("host*"))
        report["guest"] = json.loads(homenode("show", "--host", str(guest), "--json"))
        report["verified"] = homenode_ended(
            "verify", "--guest", str(guest), "--plan", str(run / "plan.json"), "--explain"
        )
    say(name, json.dumps(report))
    step(f"{name} reported")


def main() -> None:
    subprocess.run(["modprobe", "vfio-pci"], check=True)
    start_libvirtd()
    Path("/tmp/agent").mkdir()
    os.environ["HOMENODE_EMULATED_TRIALS"] = "1"
    directory = agent_virsh(Path("/tmp/agent"), AGENT, answer_s=170)
    os.environ["PATH"] = f"{directory}:{os.environ['PATH']}"
    step("libvirtd")
    host = json.loads(homenode("show", "--json"))
    disks = sorted(
        d["bdf"] for d in host["pci_devices"] if d["kind"] == "nvme" and d["node"] is not None
    )
    trial("vm", disks, "--policy", "spread")


run_and_report(main)
