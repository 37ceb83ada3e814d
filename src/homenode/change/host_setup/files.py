"""SetupFiles: the files that give a host what its plans need.

Sources: systemd.unit(5), systemd.resource-control(5) AllowedCPUs=; Linux
Documentation/admin-guide/kernel-parameters.txt (hugepages=NODE:COUNT since 5.16, isolcpus=,
nohz_full=, rcu_nocbs=, irqaffinity=); irqbalance(1) IRQBALANCE_BANNED_CPULIST; libvirt "Hooks for
specific system management".
"""

import shlex
from collections.abc import Iterator
from enum import StrEnum

from msgspec import Struct

from homenode.change.host_setup.needs import HostNeeds, NodePages
from homenode.errors import UsageError
from homenode.unit_rights import unit_rights
from homenode.wording import command_line

MARK = "# Written by homenode host-setup; homenode host-setup undo removes it."
_KIB = 1024
_UNITS = "/etc/systemd/system"
_IRQBALANCE = f"{_UNITS}/irqbalance.service.d/50-homenode.conf"
_GRUB = "/etc/default/grub.d/50-homenode.cfg"
HOOK = "/etc/libvirt/hooks/qemu.d/50-homenode"


class Isolation(StrEnum):
    """When the VMs' PUs are kept free of the host's own work."""

    NONE = "none"
    START = "start"  # while one of the VMs runs, by a libvirt hook
    BOOT = "boot"  # always, by the kernel's command line


class SetupFile(Struct, frozen=True):
    """One file. path: absolute. activate: the command that makes it count, to be run by hand."""

    path: str
    text: str
    mode: int
    activate: str


def setup_files(needs: HostNeeds, isolation: Isolation) -> tuple[SetupFile, ...]:
    """All files, in the order in which they are written."""
    return tuple(_files(needs, isolation))


def _files(needs: HostNeeds, isolation: Isolation) -> Iterator[SetupFile]:
    for node in sorted({one.node for one in needs.pages}):
        yield _pages_unit(node, tuple(one for one in needs.pages if one.node == node))
    if isolation is Isolation.NONE or not needs.vm_pus:
        return
    yield SetupFile(
        _IRQBALANCE,
        f"{MARK}\n[Service]\nEnvironment=IRQBALANCE_BANNED_CPULIST={needs.vm_pus}\n",
        0o644,
        "systemctl daemon-reload && systemctl try-restart irqbalance",
    )
    if isolation is Isolation.BOOT:
        yield SetupFile(
            _GRUB,
            f"{MARK}\nGRUB_CMDLINE_LINUX_DEFAULT="
            f'"$GRUB_CMDLINE_LINUX_DEFAULT {kernel_parameters(needs)}"\n',
            0o644,
            "update-grub, then reboot; without grub.d: grubby --update-kernel=ALL "
            f"--args='{kernel_parameters(needs)}'",
        )
    else:
        yield SetupFile(
            HOOK,
            _hook(needs),
            0o755,
            "systemctl try-restart libvirtd virtqemud",
        )


def after_removal(path: str) -> str | None:
    """The command that ends what a removed file did; None where nothing is left of it."""
    folder, _, name = path.rpartition("/")
    if folder == _UNITS:
        return command_line("systemctl", "disable", name) + " && systemctl daemon-reload"
    if path == _IRQBALANCE:
        return "systemctl daemon-reload && systemctl try-restart irqbalance"
    return "update-grub, then reboot" if path == _GRUB else None


def kernel_parameters(needs: HostNeeds) -> str:
    """isolcpus and what belongs to it. Units reserve huge pages: they say where that fails."""
    pus = str(needs.vm_pus)
    return (
        f"isolcpus=managed_irq,domain,{pus} nohz_full={pus} rcu_nocbs={pus} "
        f"irqaffinity={needs.host_pus}"
    )


def _pages_unit(node: int, pages: tuple[NodePages, ...]) -> SetupFile:
    name = f"homenode-huge-pages-node{node}.service"
    lines = [
        MARK,
        "[Unit]",
        f"Description=Reserve huge pages for virtual machines on NUMA node {node}",
        "DefaultDependencies=no",
        "After=systemd-modules-load.service",
        "Before=sysinit.target libvirtd.service virtqemud.service",
        f"ConditionPathIsDirectory=/sys/devices/system/node/node{node}",
        "",
        "[Service]",
        "Type=oneshot",
        "RemainAfterExit=yes",
        "PrivateNetwork=yes",
        *unit_rights(),  # the files belong to root, and the kernel asks for no more
    ]
    # The largest first: smaller ones break up what they would need.
    for one in sorted(pages, key=lambda each: -each.page_bytes):
        file = (
            f"/sys/devices/system/node/node{node}/hugepages/"
            f"hugepages-{one.page_bytes // _KIB}kB/nr_hugepages"
        )
        # More than these may be there for others: they are only added to.
        count = str(one.pages)
        enough = f'test "$(cat {file})" -ge ' + count
        lines.append(f"ExecStart=/bin/sh -c '{enough} || echo " + count + f" > {file}'")
        lines.append(f"ExecStart=/bin/sh -c '{enough}'")
    lines += ["", "[Install]", "WantedBy=sysinit.target", ""]
    return SetupFile(
        f"{_UNITS}/{name}",
        "\n".join(lines),
        0o644,
        "systemctl daemon-reload && " + command_line("systemctl", "enable", "--now", name),
    )


def _hook(needs: HostNeeds) -> str:
    names = []
    for number, name in enumerate(needs.domains):
        if "\n" in name or "\0" in name:
            raise UsageError(f"domain {name!r}: expected a name on one line")
        # Always in quotes: a bare "esac" would end the list.
        pattern = "'" + name.replace("'", "'\\''") + "'"
        names.append(f"{pattern}) vm={number} ;;")
    everything = needs.host_pus | needs.vm_pus
    cases = "\n  ".join(names)
    return f"""#!/bin/sh
{MARK}
# While one of these VMs runs, the host's own work stays off their PUs.
PATH=/usr/sbin:/usr/bin:/sbin:/bin
case "$1" in
  {cases}
  *) exit 0 ;;
esac
running=/run/homenode/vms
allow() {{
  for slice in system.slice user.slice init.scope; do
    systemctl set-property --runtime -- "$slice" AllowedCPUs="$1"
  done
}}
case "$2/$3" in
  prepare/begin)
    mkdir -p "$running"
    : > "$running/$vm"
    allow {shlex.quote(str(needs.host_pus))}
    ;;
  release/end)
    rm -f "$running/$vm"
    [ -n "$(ls -A "$running" 2>/dev/null)" ] || allow {shlex.quote(str(everything))}
    ;;
esac
exit 0
"""
