"""The settings part of a host.toml: the running system's, and which PUs are set apart."""

from msgspec import Struct

from homenode.cpuset import CpuSet
from homenode.machine.description.document import HostDocument
from homenode.machine.topology import HostSettings


class PuSettings(Struct, frozen=True):
    """PUs out of the cgroup of whoever looked, in isolcpus=, and in nohz_full=."""

    disallowed: CpuSet
    isolated: CpuSet
    nohz_full: CpuSet


def parse_pu_settings(file: HostDocument, online: CpuSet) -> PuSettings:
    table = file.settings
    for where, key, pus in (
        (file, "disallowed_pus", file.disallowed_pus),
        (table, "isolated", table.isolated),
        (table, "nohz_full", table.nohz_full),
    ):
        if not pus <= online:
            raise where.refusal(key, f"some of the online PUs {online}", str(pus))
    if file.disallowed_pus == online:
        raise file.refusal("disallowed_pus", f"some of the PUs {online}, not all", str(online))
    return PuSettings(file.disallowed_pus, table.isolated, table.nohz_full)


def parse_settings(file: HostDocument, online: CpuSet, *, smt: bool) -> HostSettings:
    """The settings; SMT's and the kernel's command line follow from the rest where not given.

    online: the PUs that have the governor. smt: whether some core has online siblings.
    """
    table = file.settings
    governor = table.governor
    words = [
        f"{word}={pus}"
        for pus, word in ((table.isolated, "isolcpus"), (table.nohz_full, "nohz_full"))
        if pus
    ]
    return HostSettings(
        kernel_release=table.kernel_release,
        kernel_command_line=table.kernel_command_line
        or " ".join(["BOOT_IMAGE=/boot/vmlinuz", "ro", *words]),
        smt_control=table.smt_control or ("on" if smt else "notsupported"),
        governors=None if governor is None else (governor,),
        pus_of_governor=None if governor is None else ((governor, online),),
        transparent_hugepages=table.transparent_hugepages,
        numa_balancing=table.numa_balancing,
        libvirt_version=None if table.libvirt is None else table.libvirt.numbers,
        qemu_version=None if table.qemu is None else table.qemu.numbers,
    )
