"""A guest for trials: the distribution's kernel, busybox, and what stands in for its agent."""

import os
from collections.abc import Mapping
from pathlib import Path

from homenode.check.verify.boot.guest_files import find_guest_files, pack_initramfs
from tests.lab.serial_agent import CHANNEL, LOOP

UUID = "6e1f6d5e-4a35-4c9c-8f2e-5a0d1c2b3a49"
NAME = "vm 7"

_INIT = """#!/bin/busybox sh
/bin/busybox --install -s /bin
export PATH=/bin
mount -t proc proc /proc
mount -t sysfs sys /sys
mount -t devtmpfs dev /dev
mkdir /tmp /run
# With maxcpus=1 the kernel is up sooner, and the others come now.
for cpu in /sys/devices/system/cpu/cpu*/online; do [ -e $cpu ] && echo 1 >$cpu; done
# What `poweroff` signals, and that even while a shell runs.
trap 'exec /bin/busybox poweroff -f' USR2
"""
_IDLE = """while :; do
  sleep 1000 &
  wait $!
done
"""

_DOMAIN = """<domain type='qemu'>
  <name>{name}</name>
  <uuid>{uuid}</uuid>
  <memory unit='MiB'>512</memory>
  <currentMemory unit='MiB'>512</currentMemory>
  <vcpu placement='static'>2</vcpu>
  <os>
    <type arch='x86_64' machine='q35'>hvm</type>
    <kernel>{kernel}</kernel>
    <initrd>{initrd}</initrd>
    <cmdline>console=ttyS0 quiet mitigations=off nowatchdog no_timer_check</cmdline>
  </os>
  <features><acpi/><apic/></features>
  <cpu mode='maximum' check='none'/>
  <on_poweroff>destroy</on_poweroff>
  <on_reboot>destroy</on_reboot>
  <on_crash>destroy</on_crash>
  <devices>
    <emulator>{emulator}</emulator>
    <controller type='usb' model='none'/>
    <serial type='pty'><target port='0'/></serial>
    {agent}
    <memballoon model='none'/>
  </devices>
</domain>
"""


def trial_initrd(programs: Mapping[str, bytes]) -> bytes:
    """An archive with busybox and an init that answers at the second serial port. programs: as
    below."""
    return pack_initramfs(find_guest_files().busybox, _INIT + LOOP + _IDLE, programs)


def trial_guest(
    directory: Path, emulator: Path, programs: Mapping[str, bytes], socket: Path
) -> Path:
    """A domain document, with the files that it boots. programs: more in the guest's /bin. socket:
    where it answers."""
    kernel, initrd = directory / "kernel", directory / "initrd"
    kernel.write_bytes(find_guest_files().kernel.read_bytes())
    initrd.write_bytes(trial_initrd(programs))
    document = directory / "vm.xml"
    document.write_text(
        _DOMAIN.format(
            name=NAME,
            uuid=UUID,
            kernel=kernel,
            initrd=initrd,
            emulator=emulator,
            agent=CHANNEL.format(socket=socket),
        )
    )
    for path in (kernel, initrd):
        os.chmod(path, 0o644)  # noqa: PTH101
    return document
