"""The settings part of a host.toml: the running system's, and which PUs are set apart."""

import re
from dataclasses import dataclass

from homenode.cpuset import CpuSet
from homenode.description.table import Table
from homenode.topology import HostSettings

SETTINGS_KEYS = tuple(
    """
    kernel_release kernel_command_line isolated nohz_full smt_control governor
    transparent_hugepages numa_balancing libvirt qemu
""".split()
)


_VERSION = re.compile(r"(\d{1,4})\.(\d{1,4})\.(\d{1,4})\Z", re.ASCII)


@dataclass(frozen=True, slots=True)
class PuSettings:
    """PUs out of the cgroup of whoever looked, in isolcpus=, and in nohz_full=."""

    disallowed: CpuSet
    isolated: CpuSet
    nohz_full: CpuSet


def parse_pu_settings(file: Table, online: CpuSet) -> PuSettings:
    table = file.table("settings", SETTINGS_KEYS)
    found = PuSettings(file.pus("disallowed_pus"), table.pus("isolated"), table.pus("nohz_full"))
    for where, key, pus in (
        (file, "disallowed_pus", found.disallowed),
        (table, "isolated", found.isolated),
        (table, "nohz_full", found.nohz_full),
    ):
        if not pus <= online:
            raise where.refusal(key, f"some of the online PUs {online}", str(pus))
    if found.disallowed == online:
        raise file.refusal("disallowed_pus", f"some of the PUs {online}, not all", str(online))
    return found


def parse_settings(file: Table, online: CpuSet, *, smt: bool) -> HostSettings:
    """The settings; SMT's and the kernel's command line follow from the rest where not given.

    online: the PUs that have the governor. smt: whether some core has online siblings.
    """
    table = file.table("settings", SETTINGS_KEYS)
    governor = table.optional_text("governor")
    words = [
        f"{word}={table.text(key)}"
        for key, word in (("isolated", "isolcpus"), ("nohz_full", "nohz_full"))
        if key in table
    ]
    return HostSettings(
        kernel_release=table.optional_text("kernel_release"),
        kernel_command_line=table.optional_text("kernel_command_line")
        or " ".join(["BOOT_IMAGE=/boot/vmlinuz", "ro", *words]),
        smt_control=table.text("smt_control", "on" if smt else "notsupported"),
        governors=None if governor is None else (governor,),
        pus_of_governor=None if governor is None else ((governor, online),),
        transparent_hugepages=table.optional_text("transparent_hugepages"),
        numa_balancing=table.optional_integer("numa_balancing", most=3),
        libvirt_version=_version(table, "libvirt"),
        qemu_version=_version(table, "qemu"),
    )


def _version(table: Table, key: str) -> tuple[int, int, int] | None:
    text = table.optional_text(key)
    if text is None:
        return None
    match = _VERSION.match(text)
    if match is None:
        raise table.refusal(key, 'a version such as "10.0.0"', text)
    return int(match[1]), int(match[2]), int(match[3])
