"""RetrainInstall: texts of the systemd unit and the libvirt hook that keep links up.

Source: systemd.unit(5), systemd.service(5); libvirt "Hooks for specific system management".
"""

import shlex
from collections.abc import Sequence

from homenode.bdf import Bdf
from homenode.errors import UsageError
from homenode.unit_rights import unit_rights

UNIT_NAME = "homenode-retrain.service"


def systemd_unit(devices: Sequence[Bdf], program: str, target: int | None = None) -> str:
    """A unit that trains the links of these devices before any VM can start.

    target: generation; None = the fastest that both ends can.

    A device that is missing or busy does not stop the others, or libvirtd. Raises UsageError for a
    program that systemd cannot start.
    """
    lines = [
        "# Written by: homenode doctor retrain --print-unit",
        "[Unit]",
        "Description=Train the links of GPUs for VMs to their full speed",
        "After=systemd-modules-load.service systemd-udev-settle.service",
        "Wants=systemd-udev-settle.service",
        # Not their sockets: these come before basic.target, and we after it. systemd would break
        # that circle by leaving out sockets.target.
        "Before=libvirtd.service virtqemud.service",
        "",
        "[Service]",
        "Type=oneshot",
        "RemainAfterExit=yes",
        "TimeoutStartSec=60",
        # The journal and the links' records, which outlast it; what homenode.pyz unpacks.
        "RuntimeDirectory=homenode",
        "RuntimeDirectoryPreserve=yes",
        "CacheDirectory=homenode",
        "CacheDirectoryMode=0700",
        *unit_rights("SYS_ADMIN", "SYS_PTRACE", "DAC_READ_SEARCH", home="read-only"),
    ]
    if not program.isprintable() or any(letter in program for letter in "'\"\\"):
        raise UsageError(
            f"{program!r}: expected a path without quotes, '\\' and control characters, which "
            "systemd takes for no program"
        )
    # systemd reads "%" itself; an address has none.
    word = shlex.quote(program).replace("%", "%%")
    lines += [f"ExecStart=-{word} doctor retrain {bdf}{_option(target)} --apply" for bdf in devices]
    return "\n".join([*lines, "", "[Install]", "WantedBy=multi-user.target", ""])


def _option(target: int | None) -> str:
    return "" if target is None else f" --target {target}"


def libvirt_hook(program: str, target: int | None = None) -> str:
    """A hook that asks us at start/begin and started/begin, and that never stops a VM.

    It must not call libvirt, and it has a time limit: libvirt waits for it.
    """
    asked = f'{shlex.quote(program)} doctor hook{_option(target)} -- "$1" "$2"'
    return f"""#!/bin/sh
# Written by: homenode doctor retrain --print-hook
# libvirt calls: qemu DOMAIN OPERATION SUB-OPERATION EXTRA, with the domain's XML as input.
PATH=/usr/sbin:/usr/bin:/sbin:/bin
case "$2/$3" in
start/begin|started/begin)
    timeout 30 {asked} 2>&1 | logger -t homenode-hook
    ;;
esac
exit 0
"""
