"""Copies: a domain next to its original has everything of its own that libvirt wants."""

import re

import pytest

from homenode.errors import InputError, UsageError
from homenode.vm.domain.copy import check_shared, copy_domain, make_mac, make_uuid
from homenode.vm.domain.document import parse_document
from homenode.vm.domain.read import find_nvram_file
from homenode.vm.domain.schema import validate
from tests.domain_corpus import NAMES, sample

FULL = b"""<domain type='kvm' id='12'>
  <name>vm</name>
  <uuid>6f7b4c2e-5a0d-4a53-9d0e-3c1f2b7a9e10</uuid>
  <genid>43dc0cf8-809b-4adb-9bea-a9abb5f3d90e</genid>
  <memory unit='GiB'>4</memory>
  <vcpu>4</vcpu>
  <os>
    <type arch='x86_64' machine='q35'>hvm</type>
    <loader readonly='yes' type='pflash'>/usr/share/OVMF/OVMF_CODE.fd</loader>
    <nvram>/var/lib/libvirt/qemu/nvram/vm_VARS.fd</nvram>
    <smbios mode='sysinfo'/>
  </os>
  <sysinfo type='smbios'>
    <system>
      <entry name='uuid'>6f7b4c2e-5a0d-4a53-9d0e-3c1f2b7a9e10</entry>
    </system>
  </sysinfo>
  <devices>
    <disk type='file' device='disk'>
      <source file='/var/lib/libvirt/images/vm.qcow2'/>
      <target dev='vda' bus='virtio'/>
    </disk>
    <disk type='file' device='cdrom'>
      <target dev='sda' bus='sata'/>
      <readonly/>
    </disk>
    <interface type='network'>
      <mac address='52:54:00:11:22:33'/>
      <source network='default'/>
      <target dev='vnet3'/>
    </interface>
    <interface type='bridge'>
      <mac address='52:54:00:11:22:34'/>
      <source bridge='br0'/>
      <target dev='tap-vm'/>
    </interface>
    <channel type='unix'>
      <source mode='bind' path='/run/libvirt/qemu/channel/12-vm/org.qemu.guest_agent.0'/>
      <target type='virtio' name='org.qemu.guest_agent.0'/>
    </channel>
    <serial type='file'>
      <source path='/var/log/vm.log'/>
    </serial>
    <graphics type='vnc' port='5901' autoport='no' listen='127.0.0.1'/>
    <vsock model='virtio'>
      <cid auto='no' address='3'/>
    </vsock>
    <hostdev mode='subsystem' type='pci' managed='yes'>
      <source>
        <address domain='0x0000' bus='0x19' slot='0x00' function='0x0'/>
      </source>
      <alias name='ua-gpu'/>
    </hostdev>
  </devices>
</domain>
"""


def test_everything_that_must_be_its_own_is_its_own() -> None:
    copy = copy_domain(FULL, "vm-pin").decode()
    assert "<domain type='kvm'>" in copy
    assert "<name>vm-pin</name>" in copy
    own = make_uuid("6f7b4c2e-5a0d-4a53-9d0e-3c1f2b7a9e10", "vm-pin")
    assert copy.count(own) == 2
    assert "6f7b4c2e" not in copy
    assert "43dc0cf8" not in copy
    assert "<nvram>/var/lib/libvirt/qemu/nvram/vm-pin_VARS.fd</nvram>" in copy
    assert "52:54:00:11" not in copy
    assert "port='-1' autoport='yes'" in copy
    assert "<cid auto='yes'/>" in copy
    secure = FULL.replace(b"port='5901' autoport", b"tlsPort='5902' websocket='5700' autoport")
    assert b"tlsPort='-1' websocket='-1' autoport='yes'" in copy_domain(secure, "vm-pin")
    for cid in (b"", b"<cid auto='no'/>"):  # an address that libvirt chooses already
        free = FULL.replace(b"<cid auto='no' address='3'/>", cid)
        assert b"<cid auto='yes'" not in copy_domain(free, "vm-pin")
    assert "12-vm" not in copy
    assert "<alias name='ua-gpu'/>" in copy
    assert validate(copy.encode())[0] == ()
    assert "52:54:00:11" in copy_domain(FULL, "vm-pin", has_own_macs=False).decode()


def test_a_copy_is_the_same_bytes_every_time_and_another_for_another_name() -> None:
    assert copy_domain(FULL, "a") == copy_domain(FULL, "a")
    assert copy_domain(FULL, "a").replace(b">a<", b">b<") != copy_domain(FULL, "b")


def test_macs_are_local_unicast_and_distinct() -> None:
    macs = {make_mac(f"52:54:00:00:00:{i:02x}", "copy") for i in range(64)}
    assert len(macs) == 64
    assert all(int(mac[:2], 16) & 3 == 2 for mac in macs)
    assert make_mac("52:54:00:0A:0B:0C", "copy") == make_mac("52:54:00:0a:0b:0c", "copy")


def test_what_both_domains_would_share_is_said() -> None:
    xml = FULL.replace(b"device='disk'", b"device='lun'").replace(b"vnet3", b"macvtap3")
    found = {finding.id: finding.subject for finding in check_shared(xml)}
    assert found["copy-shares-disk"] == "disk vda"
    assert found["copy-shares-tap"] == "interface tap-vm"
    assert found["copy-shares-file"] == "serial /var/log/vm.log"
    assert found["copy-shares-device"].startswith("hostdev")
    assert len(check_shared(xml)) == 4
    for part in ((b"device='lun'", b"device='floppy'"), (b"type='pci'", b"type='usb'")):
        assert len(check_shared(xml.replace(*part))) == 4
    medium = xml.replace(b"<target dev='sda'", b"<source file='/n/cd.iso'/><target dev='sda'")
    assert len(check_shared(medium.replace(b"<readonly/>", b""))) == 4
    for disk in (b"<readonly/></disk>", b"<shareable/></disk>"):
        read_only = xml.replace(b"</disk>", disk, 1)
        assert len(check_shared(read_only)) == 4 - (b"readonly" in disk)
    empty = re.sub(rb"<source file='[^']*'/>", b"", xml)
    assert "copy-shares-disk" not in {finding.id for finding in check_shared(empty)}


@pytest.mark.parametrize("name", NAMES)
def test_every_sample_can_be_copied(name: str) -> None:
    copy = copy_domain(sample(name), "Größe & <co>")
    root = parse_document(copy, name).root
    element = root.child("name")
    assert element is not None
    assert element.text == "Größe & <co>"


def test_an_nvram_file_that_is_not_named_after_the_domain_gets_its_name_in_front() -> None:
    xml = FULL.replace(b"nvram/vm_VARS.fd", b"nvram/vmware.fd")
    nested = re.sub(
        rb"<nvram>.*</nvram>", b"<nvram type='file'><source file='/n/vm.fd'/></nvram>", FULL
    )
    for original, path in ((xml, "/var/lib/libvirt/qemu/nvram/b_vmware.fd"), (nested, "/n/b.fd")):
        assert find_nvram_file(parse_document(copy_domain(original, "b"), "b")) == path


@pytest.mark.parametrize("name", ["", " ", "a/b", "a\nb", "x" * 256, ".."])
def test_a_name_that_libvirt_would_refuse_is_refused(name: str) -> None:
    with pytest.raises(UsageError, match="1 to 255 characters"):
        copy_domain(FULL, name)


def test_the_originals_own_name_is_refused() -> None:
    with pytest.raises(InputError, match="is the name of the VM itself"):
        copy_domain(FULL, "vm")
    with pytest.raises(InputError, match="expected a UUID"):
        copy_domain(FULL.replace(b"<uuid>6f7b", b"<uuid>zz"), "b")
