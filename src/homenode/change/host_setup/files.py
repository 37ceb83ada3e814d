"""SetupFiles: the files that give a host what its plans need.

Sources: systemd.unit(5), systemd.resource-control(5) AllowedCPUs=; Linux
Documentation/admin-guide/kernel-parameters.txt (hugepages=NODE:COUNT since 5.16, isolcpus=,
nohz_full=, rcu_nocbs=, irqaffinity=); irqbalance(1) IRQBALANCE_BANNED_CPULIST; libvirt "Hooks for
specific system management".

What a unit is left with: systemd.exec(5), systemd.resource-control(5); what each line is worth:
systemd-analyze(1), security. Versions that do not know a line leave it out with a warning.
"""

from collections.abc import Iterator, Sequence
from enum import StrEnum

from msgspec import Struct

from homenode.cpuset import CpuSet
from homenode.errors import UsageError
from homenode.input_files import package_text
from homenode.machine.topology import Host
from homenode.vm.plan_model import Plan
from homenode.wording import command_line

OF_ALL_UNITS = tuple(package_text("change", "host_setup", "unit.txt").splitlines())
"""ProtectSystem=strict is but for /dev, /proc and /sys: units write to /sys."""

_HOOK, _PAGES = (package_text("change", "host_setup", name) for name in ("hook.sh", "pages.txt"))


def unit_rights(*capabilities: str, home: str = "yes") -> tuple[str, ...]:
    """The lines. home: of ProtectHome=, "read-only" where the program may lie in one.

    SYS_ADMIN is asked for by the kernel to read more than 64 bytes of a device's configuration
    space, and SYS_PTRACE with DAC_READ_SEARCH to see which files other users' processes have open.
    """
    bounds = " ".join(f"CAP_{one}" for one in capabilities)
    return (*OF_ALL_UNITS, f"ProtectHome={home}", f"CapabilityBoundingSet={bounds}")


class NodePages(Struct, frozen=True):
    """Huge pages of one size that all VMs together need on a node."""

    node: int
    page_bytes: int
    pages: int


class HostNeeds(Struct, frozen=True):
    """domains: names of the VMs. vm_pus: PUs that their vCPUs are pinned to. host_pus: online PUs
    that are left for everything else."""

    domains: tuple[str, ...]
    pages: tuple[NodePages, ...]
    vm_pus: CpuSet
    host_pus: CpuSet


def needs_of(plans: Sequence[tuple[str, Plan]], host: Host) -> HostNeeds:
    """What the plans need together. plans: each with what to call it in messages.

    Raises UsageError where two plans share a PU, or where no PU is left for the host.
    """
    owner: dict[int, str] = {}
    pages: dict[tuple[int, int], int] = {}
    for source, plan in plans:
        mine = CpuSet(pu for pins in plan.vcpu_pins for pu in pins)
        for pu in mine:
            if owner.setdefault(pu, source) != source:
                raise UsageError(
                    f"{source}: expected PUs of its own, found PU {pu} in {owner[pu]} as well",
                    hint="plan the second VM after the first: homenode plan --after FIRST.json",
                )
        for one in plan.page_reservations:
            key = int(one.node), one.page_bytes
            pages[key] = pages.get(key, 0) + one.pages
    vm_pus = CpuSet(owner)
    host_pus = CpuSet(int(pu.index) for pu in host.pus if pu.online) - vm_pus
    if not host_pus:
        raise UsageError(
            f"{host.name}: expected PUs that are left for the host, found all pinned to vCPUs",
            hint="plan with a share for the host: --host-reserve",
        )
    return HostNeeds(
        tuple(plan.vm.name for _, plan in plans),
        tuple(NodePages(node, size, count) for (node, size), count in sorted(pages.items())),
        vm_pus,
        host_pus,
    )


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
    # The files belong to root, and the kernel asks for no more.
    lines = [MARK, *_PAGES.format(node=node).splitlines(), *unit_rights()]
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
    cases = "\n  ".join((*names, "*) exit 0 ;;"))
    pus = f"host_pus={needs.host_pus} all_pus={needs.host_pus | needs.vm_pus}"
    return f'#!/bin/sh\n{MARK}\n{pus}\ncase "$1" in\n  {cases}\nesac\n{_HOOK}'
