"""QmHook: the hook script of a VM of Proxmox, which pins its threads and reserves its devices."""

from dataclasses import replace

from homenode.plan.model import Plan, with_vm
from homenode.targets.qm_conf import start_timeout_s
from homenode.targets.script import PIN, PREPARE, plan_values

_HOOK = r"""#!/usr/bin/env bash
# homenode: hook script for a VM of Proxmox, layout {layout}.
# Copy it to a storage with snippets, such as /var/lib/vz/snippets, and make it executable.
set -euo pipefail

"""

_HOOK_TAIL = r"""
# In Proxmox's own list, so that no other VM starts with these devices.
reserve() {
  perl -MPVE::QemuServer::PCI -e \
    'my ($seconds, $vmid, $pid, @ids) = @ARGV;
     my @until = $pid ? (undef, $pid) : ($seconds, undef);
     PVE::QemuServer::PCI::reserve_pci_usage(\@ids, $vmid, @until)' \
    "$reserved_s" "$@"
}

release() {
  perl -MPVE::QemuServer::PCI -e 'PVE::QemuServer::PCI::remove_pci_reservation($ARGV[0])' "$1"
}

vmid=${1:?the id of the VM}
case ${2:?the phase} in
  pre-start)
    if ((${#devices[@]})); then reserve "$vmid" 0 "${devices[@]}"; fi
    prepare
    ;;
  post-start)
    pid=$(</run/qemu-server/"$vmid".pid)
    if ((${#devices[@]})); then reserve "$vmid" "$pid" "${devices[@]}"; fi
    pin "$pid"
    ;;
  post-stop)
    if ((${#devices[@]})); then release "$vmid"; fi
    ;;
  *) ;;
esac
"""


def hook_script(plan: Plan, *, mirrored: bool) -> str | None:
    """The script; None where nothing is left for it to do."""
    if not plan.vcpu_pins and not mirrored:
        return None
    # Proxmox reserves huge pages itself, and devices of hostpciN.
    own = replace(plan, page_reservations=())
    if not mirrored:
        own = with_vm(own, hostdevs=())
    head = _HOOK.replace("{layout}", plan.layout.name)
    # From before `prepare` until the VM runs, with as many NICs as Proxmox takes.
    start_s = start_timeout_s(("hostpci0", "hugepages"), plan.memory_bytes) + 5 * 32
    reserved = f"reserved_s={start_s + 60}\n"
    return head + plan_values(own) + reserved + PREPARE + PIN + _HOOK_TAIL
