"""Runs inside a virtual host with an IOMMU: passes a NIC of each node on to a VM, and checks it."""

import json
import subprocess
from pathlib import Path
from typing import Any

from homenode.machine.tools.versions import parse_virsh_version
from homenode.vm.domain.iommu import edit_iommufd
from homenode.vm.domain.read import open_domain
from tests.lab.inside import (
    bound_memory,
    homenode,
    hostdevs,
    process_of,
    run_and_report,
    say,
    start_libvirtd,
    step,
    threads,
    verified,
    virsh,
    without_iommufd,
)

DOMAIN = """<domain type='qemu'>
  <name>vm</name>
  <memory unit='MiB'>256</memory>
  <vcpu>4</vcpu>
  <os><type arch='x86_64' machine='q35'>hvm</type></os>
  <features><acpi/><apic/></features>
  <cpu mode='custom' match='exact' check='none'><model>qemu64</model></cpu>
  <devices>
    <emulator>/usr/bin/qemu-system-x86_64</emulator>
    <controller type='usb' model='none'/>
    <controller type='pci' index='0' model='pcie-root'/>
    {devices}
    <memballoon model='none'/>
  </devices>
</domain>
"""
RESERVE = ("--host-reserve", "memory=64MiB")


def main() -> None:
    subprocess.run(["modprobe", "vfio-pci"], check=True)
    say("groups", str(len(list(Path("/sys/kernel/iommu_groups").iterdir()))))
    start_libvirtd()
    step("libvirtd")
    host = json.loads(homenode("show", "--json"))
    nics = sorted(d["bdf"] for d in host["pci_devices"] if d["kind"] == "nic")
    say("host", json.dumps(host))
    devices = hostdevs(nics)
    Path("/tmp/vm.xml").write_text(DOMAIN.format(devices=devices))
    virsh("define", "/tmp/vm.xml")
    before = virsh("dumpxml", "--inactive", "--security-info", "vm")
    step("defined")
    words = "apply vm --yes --layout pin-numa-pci --policy spread --save-plan /tmp/plan.json -q"
    homenode(*words.split(), *RESERVE)
    step("applied")
    virsh("start", "--paused", "vm")
    step("started")
    drivers = {nic: Path(f"/sys/bus/pci/devices/{nic}/driver").resolve().name for nic in nics}
    report = {
        "plan": json.loads(Path("/tmp/plan.json").read_text()),
        "live": virsh("dumpxml", "vm"),
        "drivers": drivers,
        "nodes": {
            nic: int(Path(f"/sys/bus/pci/devices/{nic}/numa_node").read_text()) for nic in nics
        },
        "threads": threads(process_of("vm")),
        "memory": bound_memory(process_of("vm")),
        "findings": verified("vm", "/tmp/plan.json"),
    }
    say("vm", json.dumps(report))
    step("verified")
    from homenode.cli.apply import apply
    from homenode.cli.arguments.place import ApplyArguments, RestoreArguments
    from homenode.cli.restore import restore
    from homenode.errors import HomenodeError
    from homenode.vm.plan_options import PlanOptions

    try:  # a running domain is not redefined under its feet
        apply(ApplyArguments(names=("vm",), options=PlanOptions("pin"), quiet=True, yes=True))
    except HomenodeError as error:
        say("refused", json.dumps(str(error)))
    vcpu0 = virsh("vcpupin", "vm", "0")
    homenode("apply", "vm", "--layout", "pin", "-q", "--live-pins", "--yes", *RESERVE)
    say("moved", json.dumps([vcpu0, virsh("vcpupin", "vm", "0")]))
    virsh("destroy", "vm")
    restore(RestoreArguments(targets=("vm",), yes=True))
    after = virsh("dumpxml", "--inactive", "--security-info", "vm")
    say("restored", json.dumps([before, after]))
    step("restored")
    say("iommufd", json.dumps(through_iommufd()))
    step("iommufd")


def through_iommufd() -> dict[str, Any]:
    """The same VM with its devices through iommufd: {"devices": open}, or {"not tried": why}."""
    subprocess.run(["modprobe", "-q", "iommufd"], check=False)
    libvirt, qemu = parse_virsh_version(virsh("version"))
    has_device = Path("/dev/iommu").exists()
    why = without_iommufd(libvirt, qemu, has_device=has_device)
    if why is not None:
        return {"not tried": why}
    path = Path("/tmp/iommufd.xml")
    document = open_domain(virsh("dumpxml", "--inactive", "--security-info", "vm").encode(), "vm")
    path.write_bytes(edit_iommufd(document, libvirt).to_bytes())
    virsh("define", str(path))
    virsh("start", "--paused", "vm")
    opened = Path(f"/proc/{process_of('vm')}/fd").iterdir()
    names = sorted(str(each.readlink()) for each in opened)
    virsh("destroy", "vm")
    return {"devices": [name for name in names if name.startswith(("/dev/vfio", "/dev/iommu"))]}


run_and_report(main)
