"""Documents to apply: a small VM as libvirt prints it, and what a plan makes of it."""

from homenode.vm.domain.read import read_vm
from homenode.vm.layout import PRESETS
from homenode.vm.targets.libvirt import rewrite
from tests.domain_plans import hand_plan
from tests.virsh_stand_in import UUID

NAME = "-vm 7"
"""A name that no command line may take for an option."""

ORIGINAL = f"""<domain type='qemu'>
  <name>{NAME}</name>
  <uuid>{UUID}</uuid>
  <memory unit='KiB'>1048576</memory>
  <currentMemory unit='KiB'>1048576</currentMemory>
  <vcpu placement='static'>4</vcpu>
  <iothreads>1</iothreads>
  <os>
    <type arch='x86_64' machine='pc-q35-7.2'>hvm</type>
  </os>
  <devices>
    <emulator>/usr/bin/qemu-system-x86_64</emulator>
    <controller type='pci' index='0' model='pcie-root'/>
    <graphics type='vnc' port='-1' passwd='kept'/>
  </devices>
</domain>
""".encode()


def tuned(layout: str = "pin-numa", original: bytes = ORIGINAL) -> bytes:
    """The document in a layout, with a comment that libvirt will drop."""
    assert layout in PRESETS
    guest = read_vm(original, "original")
    document = rewrite(original, hand_plan(guest, layout), "original")
    return document.replace(b"</domain>", b"  <!-- planned -->\n</domain>")
