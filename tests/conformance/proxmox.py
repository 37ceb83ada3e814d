"""Proxmox's own Perl takes the configuration, and makes a QEMU command of it, which starts."""

import json
import os
import re
import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from homenode.cpuset import CpuSet
from homenode.vm.targets.qm_conf import start_timeout_s
from tests.conformance.builds import PROGRAMS, absent
from tests.conformance.judge import Answer, Example, Facts, Judge
from tests.conformance.qemu import planned_facts, read_facts
from tests.conformance.qemu_machine import QEMU, QemuError, for_this_machine, machine_of
from tests.conformance.vms import Planned, planned_cases
from tests.processes import run_text

EXAMPLE = Example(
    file=b"""# my VM: description
#with lines
agent: 1
args: -fw_cfg 'name=opt/x,string=a b' -cpu host,+foo
balloon: 2048
boot: order=scsi0
cores: 16
cpu: host,flags=+pdpe1gb
hostpci0: 0000:19:00,pcie=1
hostpci1: 0000:9b:00.0,pcie=1
machine: q35
memory: 65536
name: gpu-vm
numa: 0
ostype: l26
scsi0: local-lvm:vm-101-disk-0,size=32G
sockets: 2
""",
    owned=r"(sockets|cores|memory|numa\d*|affinity|args|balloon|hostpci\d+|hookscript):",
    free=r"#|name:|machine:|cpu:|scsihw:|.*pcie=",
    refused_for=("x86_64", "a range of host nodes"),
)

VARIABLE = "HOMENODE_PVE"
"""A directory with checkouts of qemu-server and what it imports."""
_CHECKOUTS = ("qemu-server", "pve-common", "pve-guest-common", "pve-storage", "pve-access-control")
_FILE = re.sub(rb"(agent: 1\n|,\+foo)", b"", EXAMPLE.file).replace(b"65536", b"8192")
"""One of the tests of targets, as far as Proxmox's schema and this machine take it."""
_OF_A_PROXMOX = {
    *("-id", "-chardev", "-mon", "-pidfile", "-vnc", "-boot", "-smbios", "-iscsi", "-sandbox")
}
"""Options with a value that ask for its sockets and files, or that its QEMU alone has."""


_MOUNT = re.compile(r",(mem-path|prealloc|share)=[^,]+")


def _sources() -> Path:
    return Path(os.environ.get(VARIABLE, "/none"))


def missing() -> str | None:
    lacking = [name for name in _CHECKOUTS if not (_sources() / name).is_dir()]
    return absent("perl", "cc", QEMU) or (
        f"{VARIABLE} names no directory with {', '.join(lacking)}" if lacking else None
    )


def version() -> str:
    changelog = (_sources() / "qemu-server/debian/changelog").read_text()
    return changelog.partition("(")[2].partition(")")[0]


def _commands(cases: Sequence[Planned]) -> list[dict[str, Any]]:
    given = [
        {
            "conf": case.document.decode(),
            "devices": [str(one.bdf) for one in case.host.pci_devices if one.bridge is None],
        }
        for case in cases
    ]
    done = run_text(["perl", PROGRAMS / "proxmox.pl"], input=json.dumps(given), timeout=600)
    assert done.returncode == 0, done.stderr[-2000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


def started(words: Sequence[str]) -> list[str]:
    """Proxmox's command as this machine's QEMU can be asked for it."""
    rest = iter(words)
    kept = [QEMU]
    for word in rest:
        if word in ("-no-shutdown", "-nodefaults", "-daemonize", "-enable-kvm", "-S"):
            kept += [word] if word == "-nodefaults" else []
            continue
        value = next(rest)
        if word in _OF_A_PROXMOX:
            continue
        if word == "-readconfig":
            value = str(_sources() / "qemu-server/src/usr" / Path(value).name)
        if word == "-machine":
            value = re.sub(r"\+pve\d+", "", value)
        value = _MOUNT.sub("", value).replace("memory-backend-file", "memory-backend-memfd")
        kept += [word, value]
    return [*shlex.split(for_this_machine(shlex.join(kept))), "-accel", "tcg,tb-size=8"]


def _read(words: list[str]) -> Facts:
    at = next(i for i, word in enumerate(words) if word.endswith("/kvm"))
    ids = dict(
        re.findall(r"vfio-pci,(?:host|sysfsdev)=(?:[^,]*/)?([^,/]+).*?,id=([^,]+)", word)[0]
        for word in words
        if word.startswith("vfio-pci,")
    )
    ids = {bdf if bdf.count(":") == 2 else f"0000:{bdf}": one for bdf, one in ids.items()}
    machine = machine_of(started(words[at + 1 :]), list(ids.values()))
    read = read_facts(machine)
    affinity = words[at - 1] if at else ""
    return {
        **read,
        "cell of each device": {bdf: machine.cell_of(one) for bdf, one in ids.items()},
        "affinity": CpuSet.parse(affinity, "affinity") if affinity else CpuSet(),
    }


def _planned(case: Planned) -> Facts:
    plan = case.plan
    facts = dict(planned_facts(plan))
    # Memory of files, with Proxmox's own mount; and its nodes of a VM that is bound to none.
    del facts["huge pages"]
    if plan.vm.page_bytes is not None and plan.memory_mode is None:
        del facts["bound memory"]
    if not facts["cells"] and (plan.memory_mode, plan.vm.page_bytes) != (None, None):
        facts["cells"] = {0: (set(range(plan.vm.vcpus)), plan.vm.memory_bytes)}
    pus = plan.vm.pinned_pus
    document = case.document.decode().partition("\n[")[0]
    return {
        **facts,
        "cell of each device": {str(d.bdf): d.cell for d in plan.vm.hostdevs},
        "affinity": pus | (plan.vm.emulator_pus or CpuSet()) if pus else CpuSet(),
        "seconds to start": start_timeout_s(
            set(re.findall(r"^(\w+):", document, re.MULTILINE)), plan.vm.memory_bytes
        ),
    }


def ask(names: Sequence[str]) -> Iterator[Answer]:
    cases = list(planned_cases(names, "proxmox", (_FILE,)))
    for case, answer in zip(cases, _commands(cases) if cases else (), strict=True):
        read: Facts = {}
        refusal = answer.get("error")
        if refusal is None:
            try:
                words = [str(word) for word in answer["words"]]  # JSON::PP keeps numbers
                read = {**_read(words), "seconds to start": answer["timeout"]}
            except QemuError as error:
                refusal = f"QEMU: {error}"
        yield Answer(
            case=case.case, about=case.about, planned=_planned(case), read=read, refusal=refusal
        )


PROXMOX = Judge(
    name="proxmox",
    program="Proxmox qemu-server",
    reads="the configuration, by the schema of its own Perl; its config_aware_timeout; the command "
    "of config_to_command, without disks and networks, started under TCG with other devices in "
    "place of the host's",
    setup="checkouts of qemu-server, pve-common, pve-guest-common, pve-storage and "
    "pve-access-control in a directory that HOMENODE_PVE names; perl with HTTP-Message, JSON-XS, "
    "Devel-Cycle, File-chdir, Linux-Inotify2; qemu-system-x86, cc",
    version=version,
    missing=missing,
    ask=ask,
    short=5,
    marker="lab",
)
