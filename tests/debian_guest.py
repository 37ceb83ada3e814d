"""A VM of the system's libvirtd whose guest is a Debian with an ssh server and a DHCP lease."""

import hashlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.lab.kernel_image import unpacked

NAME = "homenode-debian"
URI = "qemu:///system"

_NETWORK = f"""<network>
  <name>{NAME}</name>
  <bridge name='homenode-deb'/>
  <ip address='192.168.157.1' netmask='255.255.255.0'>
    <dhcp><range start='192.168.157.2' end='192.168.157.254'/></dhcp>
  </ip>
</network>
"""

_DOMAIN = """<domain type='qemu'>
  <name>{name}</name>
  <memory unit='MiB'>512</memory>
  <vcpu>1</vcpu>
  <os>
    <type arch='x86_64' machine='q35'>hvm</type>
    <kernel>{directory}/kernel</kernel>
    <initrd>{directory}/initrd</initrd>
    <cmdline>quiet root=/dev/vda rw mitigations=off nowatchdog no_timer_check {words}</cmdline>
  </os>
  <features><acpi/><apic/></features>
  <cpu mode='custom' check='none'><model>qemu64</model><feature policy='disable' name='svm'/></cpu>
  <devices>
    <disk type='file' device='disk'>
      <driver name='qemu' type='raw'/>
      <source file='{directory}/disk.ext4'/>
      <target dev='vda' bus='virtio'/>
    </disk>
    <controller type='usb' model='none'/>
    <interface type='network'>
      <mac address='52:54:00:68:6e:01'/><source network='{name}'/><model type='virtio'/>
    </interface>
    <channel type='unix'><target type='virtio' name='org.qemu.guest_agent.0'/></channel>
    <memballoon model='none'/>
  </devices>
</domain>
"""

_SLOW_HOST = "systemd.default_timeout_start_sec=900"
"""Words for a guest whose host is busy: a service may take long to start there."""


class DebianVm:
    """The defined domain, which is shut off."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory  # of the files that it boots from
        self.key = directory / "key"

    def define(self, words: str = "") -> None:
        """Define the domain anew. words: more on the kernel's command line."""
        document = self.directory / "vm.xml"
        text = _DOMAIN.format(name=NAME, directory=self.directory, words=f"{_SLOW_HOST} {words}")
        _drop_domains()
        for _ in range(2):  # only in its own print what libvirt adds stands in libvirt's order
            document.write_text(text)
            virsh_or_fail("define", str(document))
            text = virsh("dumpxml", "--inactive", NAME).stdout

    def address(self) -> str:
        addresses = virsh("net-dhcp-leases", NAME).stdout.split()
        return next((word.partition("/")[0] for word in addresses if "/" in word), "none")

    def ssh_environment(self, directory: Path) -> dict[str, str]:
        """The environment of a program whose `ssh`, made in this directory, has the key."""
        directory.mkdir()
        options = " ".join(self._ssh_words())
        (directory / "ssh").write_text(f'#!/bin/sh\nexec {shutil.which("ssh")} {options} "$@"\n')
        (directory / "ssh").chmod(0o755)
        return {**os.environ, "PATH": f"{directory}:{os.environ['PATH']}"}

    def _ssh_words(self) -> list[str]:
        options = ["BatchMode=yes", "StrictHostKeyChecking=no", "UserKnownHostsFile=/dev/null"]
        options.append("ServerAliveInterval=15")  # a guest that restarts closes no connection
        return ["-i", str(self.key), *(word for option in options for word in ("-o", option))]

    def ssh(self, command: str, user: str = "root") -> str:
        """What a command in the guest prints, or in that of its copy."""
        argv = ["ssh", *self._ssh_words(), f"{user}@{self.address()}", command]
        return subprocess.run(argv, capture_output=True, text=True, check=False).stdout

    def traces(self) -> dict[str, str]:
        """Everything that a trial may leave on the host: domains, snapshots and files, with their
        content."""
        listed = virsh("list", "--all", "--name").stdout.split()
        domains = [name for name in listed if name.startswith(NAME)]
        found = {name: virsh("dumpxml", "--inactive", name).stdout for name in domains}
        for name in domains:
            found[f"{name}: state"] = virsh("domstate", name).stdout
            found[f"{name}: snapshots"] = virsh("snapshot-list", "--name", name).stdout
        for path in sorted(self.directory.rglob("*")):
            if path.is_file():
                with path.open("rb") as file:
                    found[str(path)] = hashlib.file_digest(file, "sha256").hexdigest()
            else:
                found[str(path)] = "directory"
        return found

    def guest_files(self, directory: str) -> list[str]:
        """Names in a directory of the guest's disk, which is shut off."""
        argv = ["debugfs", "-R", f"ls -p {directory}", str(self.directory / "disk.ext4")]
        environment = {**os.environ, "PATH": f"{os.environ['PATH']}:/usr/sbin:/sbin"}
        listed = subprocess.run(argv, capture_output=True, text=True, env=environment, check=True)
        return [line.split("/")[5] for line in listed.stdout.splitlines() if line.startswith("/")]


def virsh(*words: str) -> subprocess.CompletedProcess[str]:
    argv = ["virsh", "-q", "-c", URI, *words]
    return subprocess.run(argv, capture_output=True, text=True, timeout=180, check=False)


def virsh_or_fail(*words: str) -> None:
    done = virsh(*words)
    assert done.returncode == 0, done.stderr


def guest_image() -> Path:
    """Where build-guest puts its files; skips the test where they are missing."""
    named = os.environ.get("HOMENODE_GUEST")
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    directory = Path(named) if named else cache / "homenode/debian-guest"
    if not (directory / "recipe").exists():
        pytest.skip(f"no guest in {directory}: run tests/lab/build-guest (root, once)")
    return directory


@contextmanager
def debian_vm() -> Iterator[DebianVm]:
    """The VM, with a network, a disk and everything else of its own."""
    image = guest_image()
    if virsh("uri").returncode:
        pytest.skip("no libvirtd of the system here: .ci/libvirtd starts one")
    _drop()  # what a test that was killed left
    # Not below pytest's own directory, which QEMU's user may not enter.
    with tempfile.TemporaryDirectory(prefix="homenode-debian-") as text:
        directory = Path(text)
        directory.chmod(0o755)
        subprocess.run(["cp", "--sparse=always", image / "disk.ext4", directory], check=True)
        shutil.copy2(image / "initrd", directory)
        shutil.copy2(image / "key", directory)
        (directory / "kernel").write_bytes(unpacked((image / "vmlinuz").read_bytes()))
        (directory / "network.xml").write_text(_NETWORK)
        try:
            virsh_or_fail("net-define", str(directory / "network.xml"))
            started = virsh("net-start", NAME)
            if started.returncode:
                pytest.skip(f"no network of libvirt here (dnsmasq-base?): {started.stderr.strip()}")
            vm = DebianVm(directory)
            vm.define()
            yield vm
        finally:
            _drop()


def _drop_domains() -> None:
    for name in (NAME, f"{NAME}-trial"):
        virsh("destroy", name)
        virsh("undefine", name)


def _drop() -> None:
    _drop_domains()
    virsh("net-destroy", NAME)
    virsh("net-undefine", NAME)
