"""Documents as people have them, tuned, and every edit of a single element of a document."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache

from homenode.plan.pipeline import PlannedFile, plan_file
from homenode.vm.domain.document import Element
from homenode.vm.domain.read import open_domain
from homenode.vm.plan_options import PlanOptions, Policy
from homenode.vm.sources import load_host
from tests.verify_documents import PLAIN, small_host


def users_document(vcpus: int, gib: int, devices: str = "") -> bytes:
    """A VM as people have it, with a disk, a network and a console."""
    return f"""<domain type='kvm'>
  <name>vm</name>
  <uuid>6e1f6d5e-4a35-4c9c-8f2e-5a0d1c2b3a49</uuid>
  <memory unit='GiB'>{gib}</memory>
  <currentMemory unit='GiB'>{gib}</currentMemory>
  <vcpu placement='static'>{vcpus}</vcpu>
  <iothreads>1</iothreads>
  <os firmware='efi'>
    <type arch='x86_64' machine='pc-q35-7.2'>hvm</type>
    <boot dev='hd'/>
  </os>
  <features>
    <acpi/>
    <apic/>
    <vmport state='off'/>
  </features>
  <cpu mode='host-passthrough' check='none' migratable='on'/>
  <clock offset='utc'>
    <timer name='rtc' tickpolicy='catchup'/>
  </clock>
  <on_poweroff>destroy</on_poweroff>
  <on_reboot>restart</on_reboot>
  <on_crash>destroy</on_crash>
  <devices>
    <emulator>/usr/bin/qemu-system-x86_64</emulator>
    <disk type='file' device='disk'>
      <driver name='qemu' type='qcow2' iothread='1'/>
      <source file='/var/lib/libvirt/images/vm.qcow2'/>
      <target dev='vda' bus='virtio'/>
    </disk>
    <controller type='pci' index='0' model='pcie-root'/>
    <interface type='network'>
      <mac address='52:54:00:11:22:33'/>
      <source network='default'/>
      <model type='virtio'/>
    </interface>
    <serial type='pty'>
      <target type='isa-serial' port='0'/>
    </serial>
    <console type='pty'/>
{devices}    <memballoon model='none'/>
  </devices>
</domain>
""".encode()


@cache
def users_vm(name: str) -> PlannedFile:
    if name == "8 GPUs":
        options = PlanOptions(layout="pin-numa-pci", gpu_count=8)
        return plan_file(users_document(64, 768), "vm.xml", options, load_host("hgx-h100"))
    hostdevs = PLAIN[PLAIN.index(b"    <hostdev") : PLAIN.index(b"  </devices>")].decode()
    options = PlanOptions(layout="pin-numa-pci", policy=Policy.SPREAD)
    return plan_file(users_document(4, 4, hostdevs), "vm.xml", options, small_host())


@dataclass(frozen=True, slots=True)
class Edit:
    """One edit."""

    path: tuple[str, ...]  # names from the root
    attribute: str | None  # None = the element; "text" = its text
    done: str  # "removed", "doubled", "moved" or "changed"
    said: str
    document: bytes


def edits(document: bytes) -> Iterator[Edit]:
    """Each element without, doubled and behind the one that follows it; each attribute without and
    with other values; each text with others."""

    def walk(path: tuple[str, ...], element: Element) -> Iterator[Edit]:
        path = (*path, element.name.rpartition("}")[2])
        where = f"line {element.line} <{element.tag}>"
        start, end = element.start, element.end
        if len(path) > 1:
            yield Edit(path, None, "removed", f"{where} gone", text[:start] + text[end:])
            doubled = text[:end] + text[start:end] + text[end:]
            yield Edit(path, None, "doubled", f"{where} twice", doubled)
        tag = text[start : element.tag_end].decode()
        for name, value in element.attributes:
            if name.startswith(("{", "xmlns")):
                continue
            for other in (None, *other_values(value)):
                put = "" if other is None else f" {name}='{other}'"
                new = re.sub(rf"\s{re.escape(name)}=(['\"])[^'\"]*\1", put, tag, count=1)
                yield Edit(
                    path,
                    name,
                    "removed" if other is None else "changed",
                    f"{where} {name}={value} -> {other}",
                    text[:start] + new.encode() + text[element.tag_end :],
                )
        given = element.text.strip()
        for other in other_values(given) if given and not element.children else ():
            yield Edit(
                path,
                "text",
                "changed",
                f"{where} {given} -> {other}",
                text[: element.tag_end] + other.encode() + text[element.content_end :],
            )
        for one, next_ in zip(element.children, element.children[1:], strict=False):
            moved = text[next_.start : next_.end] + text[one.end : next_.start]
            moved += text[one.start : one.end]
            yield Edit(
                (*path, one.name),
                None,
                "moved",
                f"line {one.line} <{one.tag}> behind the next",
                text[: one.start] + moved + text[next_.end :],
            )
        for child in element.children:
            yield from walk(path, child)

    opened = open_domain(document, "vm.xml")
    text = opened.text
    yield from walk((), opened.root)


SWITCHED = {
    "yes": "no",
    "on": "off",
    "efi": "bios",
    "kvm": "qemu",
    "static": "auto",
    "strict": "preferred",
    "host-passthrough": "host-model",
    "pc-q35-7.2": "q35",
    "emulate": "passthrough",
    "require": "disable",
    "0,1": "0",
}
SWITCHED |= {after: before for before, after in SWITCHED.items()}


def other_values(text: str) -> Iterator[str]:
    """Numbers one more and one less, switches the other way, another word for words."""
    base = 16 if text.startswith("0x") else 10
    digits = text.removeprefix("0x")
    if re.fullmatch(r"[0-9]+" if base == 10 else r"[0-9a-f]+", digits):
        number = int(digits, base)
        for other in (number + 1, number - 1):
            if other >= 0:
                yield f"0x{other:x}" if base == 16 else str(other)
    else:
        yield SWITCHED.get(text, "other")
