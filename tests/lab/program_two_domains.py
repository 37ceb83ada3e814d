"""Runs inside a virtual host: says what is found there, places two VMs side by side, starts and
checks them."""

import json
from pathlib import Path

from tests.lab.found import say_what_is_found
from tests.lab.inside import (
    bound_memory,
    homenode,
    process_of,
    run_and_report,
    say,
    start_libvirtd,
    step,
    threads,
    verified,
    virsh,
)

DOMAIN = """<domain type='qemu'>
  <name>{name}</name>
  <memory unit='MiB'>{mib}</memory>
  <vcpu>{vcpus}</vcpu>
  <iothreads>1</iothreads>
  <memoryBacking><allocation mode='immediate'/></memoryBacking>
  <os><type arch='x86_64' machine='q35'>hvm</type></os>
  <features><acpi/><apic/></features>
  <cpu mode='custom' match='exact' check='none'><model>qemu64</model></cpu>
  <devices>
    <emulator>/usr/bin/qemu-system-x86_64</emulator>
    <controller type='usb' model='none'/>
    <controller type='pci' index='0' model='pcie-root'/>
    <memballoon model='none'/>
  </devices>
</domain>
"""


def place(name: str, vcpus: int, *options: str) -> None:
    Path(f"/tmp/{name}.xml").write_text(DOMAIN.format(name=name, vcpus=vcpus, mib=64))
    virsh("define", f"/tmp/{name}.xml")
    step(f"{name} defined")
    plan = f"/tmp/{name}.json"
    homenode("apply", name, "--yes", "--save-plan", plan, "-q", *options)
    step(f"{name} applied")
    virsh("start", "--paused", name)
    step(f"{name} started")
    say(f"{name}.PLAN", json.dumps(verified(name, plan)))
    report = {
        "plan": json.loads(Path(plan).read_text()),
        "threads": threads(process_of(name)),
        "memory": bound_memory(process_of(name)),
    }
    say(name, json.dumps(report))
    step(f"{name} verified")


def main() -> None:
    say_what_is_found()
    start_libvirtd()
    step("libvirtd")
    # A host of 1 GiB on each node has not the 2 GiB that a host keeps.
    spread = ("--layout", "pin-numa", "--policy", "spread", "--host-reserve", "memory=64MiB")
    place("first", 4, *spread, "--emulator", "share")
    # The second one on huge pages, 16 of each node: its cells have 32 MiB.
    for node in (0, 1):
        pool = Path(f"/sys/devices/system/node/node{node}/hugepages/hugepages-2048kB")
        (pool / "nr_hugepages").write_text("16")
    place("second", 2, *spread, "--page-size", "2MiB")
    # What is wrong must be found as well: another VM's vCPU comes onto the first one's cores.
    virsh("vcpupin", "second", "0", "0-7", "--live")
    say("moved", json.dumps(verified("first")))


run_and_report(main)
