"""What homenode finds in a virtual host: its capture, what it discovers in it, and a plan there."""

import json
import subprocess
from pathlib import Path

from tests.lab.inside import homenode, hostdevs, say, step

DOMAIN = """<domain type='kvm'>
  <name>vm</name>
  <memory unit='MiB'>512</memory>
  <vcpu>{vcpus}</vcpu>
  <os><type arch='x86_64' machine='q35'>hvm</type></os>
  <cpu mode='host-passthrough'/>
  <devices>{devices}</devices>
</domain>
"""


def say_what_is_found() -> None:
    homenode("capture", "-o", "/tmp/host.tar.gz")
    step("captured")
    host = json.loads(homenode("show", "--host", "/tmp/host.tar.gz", "--json"))
    say("host", json.dumps(host))
    say("numactl", json.dumps(subprocess.check_output(["numactl", "-H"], text=True)))
    step("discovered")
    gpus = [d["bdf"] for d in host["pci_devices"] if d["kind"] == "gpu"]
    devices = hostdevs(sorted(gpus))
    vcpus = len(host["nodes"]) * 2
    Path("/tmp/vm.xml").write_text(DOMAIN.format(vcpus=vcpus, devices=devices))
    words = "plan /tmp/vm.xml --host /tmp/host.tar.gz --layout pin-numa-pci --policy spread -q"
    more = (
        "--emulator share --save-plan /tmp/plan.json --host-reserve memory=64MiB -o /tmp/tuned.xml"
    )
    homenode(*words.split(), *more.split())
    say("plan", json.dumps(json.loads(Path("/tmp/plan.json").read_text())))
    step("planned")
