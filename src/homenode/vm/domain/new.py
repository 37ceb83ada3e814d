"""NewDomain: the document of a VM that has none yet: what a plan is written into.

It has what every VM of its architecture needs and libvirt does not add by itself. Disks, networks
and displays are not homenode's to choose.
"""

from homenode.errors import InputError
from homenode.units import GIB, KIB, MIB
from homenode.vm.domain.copy import check_name
from homenode.vm.domain.edits import escaped

DEFAULT_NAME = "vm"

_MACHINES = {
    # The GIC of every host with more than 8 cores; QEMU's default is version 2.
    "aarch64": ("virt", "<acpi/>\n    <gic version='3'/>"),
    "x86_64": ("q35", "<acpi/>\n    <apic/>"),
}
"""Machine type and features, by architecture. Both have UEFI and a PCIe tree."""

_DOCUMENT = """\
<domain type='kvm'>
  <name>{name}</name>
  <memory unit='{unit}'>{memory}</memory>
  <vcpu placement='static'>{vcpus}</vcpu>
  <os firmware='efi'>
    <type arch='{architecture}' machine='{machine}'>hvm</type>
  </os>
  <features>
    {features}
  </features>
  <cpu mode='host-passthrough' check='none' migratable='off'/>
  <devices>
    <serial type='pty'/>
    <console type='pty'/>
    <memballoon model='none'/>
  </devices>
</domain>
"""


def new_domain(
    vcpus: int, memory_bytes: int, *, architecture: str | None, name: str = DEFAULT_NAME
) -> bytes:
    """A KVM guest of this size, with UEFI and the host's CPU, and without disk and network.

    architecture: of the host, None = x86_64. Memory is whole KiB, rounded up as libvirt does.
    Raises UsageError for a name that libvirt would refuse, InputError for an architecture without
    such a machine.
    """
    architecture = architecture or "x86_64"
    if architecture not in _MACHINES:
        raise InputError(
            f"a new VM: expected a host of {' or '.join(sorted(_MACHINES))}, found {architecture}",
            hint="give a domain document: virsh dumpxml --inactive NAME > VM.xml",
        )
    machine, features = _MACHINES[architecture]
    memory_bytes = -(-memory_bytes // KIB) * KIB
    unit, size = next(
        (unit, size)
        for unit, size in (("GiB", GIB), ("MiB", MIB), ("KiB", KIB))
        if memory_bytes % size == 0
    )
    return _DOCUMENT.format(
        name=escaped(check_name(name)).decode(),
        unit=unit,
        memory=memory_bytes // size,
        vcpus=vcpus,
        architecture=architecture,
        machine=machine,
        features=features,
    ).encode()
