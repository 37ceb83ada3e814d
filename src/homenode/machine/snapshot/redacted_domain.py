"""Redacted domain: what of a libvirt domain a capture keeps, and in which form.

The list is what a host's running domains are read for (domain/read.py: read_running_domain). Every
value on it has a closed form: a number, a set, a size's unit, a word that libvirt itself defines.
So nothing that someone named survives, wherever libvirt takes free text: aliases, titles, metadata,
disks, networks, serials, secrets, arguments of QEMU.

Source: libvirt's docs/schemas/domaincommon.rng and basictypes.rng.
"""

import re
from collections.abc import Mapping

from lxml import etree
from msgspec import Struct, field

from homenode.machine.snapshot.pseudonyms import Pseudonyms
from homenode.machine.tools.xml_text import parse_xml

NAME_PREFIX = "redacted/"
"""Of a domain's pseudonym. libvirt takes no "/" in names, so no document's name equals one."""

UNKNOWN_EMULATOR = "/usr/bin/redacted"


def _words(*words: str) -> re.Pattern[str]:
    return re.compile("|".join(map(re.escape, words)))


_NUMBER = re.compile(r"\s*\+?\d{1,19}\s*", re.ASCII)
_PART_OF_ADDRESS = re.compile(r"0[xX][0-9a-fA-F]{1,8}|\d{1,10}", re.ASCII)
_SET = re.compile(r"\s*\^?\d{1,7}(?:\s*[,-]\s*\^?\d{1,7})*\s*", re.ASCII)
_UUID = re.compile(r"[0-9a-fA-F]{8}-?(?:[0-9a-fA-F]{4}-?){3}[0-9a-fA-F]{12}", re.ASCII)
_SWITCH = _words("yes", "no", "on", "off")
_UNIT = re.compile(r"b|bytes?|[kKMGTPE](?:B|iB)?", re.ASCII)
_PLACEMENT = _words("static", "auto")
_MODE = _words("strict", "interleave", "preferred", "restrictive")
_ACCESS = _words("shared", "private")
_ARCHITECTURES = tuple(
    """
    aarch64 alpha armv6l armv7l i686 loongarch64 mips mips64 mips64el mipsel ppc ppc64
    ppc64le riscv32 riscv64 s390 s390x sparc sparc64 x86_64
""".split()
)
_DISTRIBUTIONS = ("rhel", "ubuntu", "noble", "jammy", "focal", "bionic", "openeuler", "bclinux")
_MACHINE = re.compile(
    r"(?:pc|q35|pc-q35|pc-i440fx|virt|pseries|microvm|s390-ccw-virtio)"
    rf"(?:-(?:{'|'.join(_DISTRIBUTIONS)})?-?\d{{1,3}}(?:\.\d{{1,3}}){{0,2}})?",
    re.ASCII,
)
_EMULATOR = re.compile(
    r"/usr/(?:local/)?(?:bin|libexec|sbin)/"
    rf"(?:qemu-system-(?:arm|i386|{'|'.join(_ARCHITECTURES)})|qemu-kvm|kvm)"
)


class Kept(Struct, frozen=True):
    """An element that stays. attributes: name -> form; text: its form, None = no text stays."""

    attributes: Mapping[str, re.Pattern[str]] = field(default_factory=dict)
    text: re.Pattern[str] | None = None
    children: "Mapping[str, Kept]" = field(default_factory=dict)


_SIZE = Kept({"unit": _UNIT}, _NUMBER)
_HOST_ADDRESS = Kept(
    {
        "type": _words("pci"),
        **dict.fromkeys(("domain", "bus", "slot", "function"), _PART_OF_ADDRESS),
        "uuid": _UUID,
    }
)
_SOURCE = Kept(children={"address": _HOST_ADDRESS})
_HOST_DEVICE = {"managed": _SWITCH}

_DOMAIN = Kept(
    {"type": _words("kvm", "qemu", "xen", "lxc", "hvf", "bhyve", "vz"), "id": _NUMBER},
    children={
        "memory": _SIZE,
        "currentMemory": _SIZE,
        "maxMemory": Kept({"unit": _UNIT, "slots": _NUMBER}, _NUMBER),
        "memoryBacking": Kept(
            children={
                "hugepages": Kept(
                    children={"page": Kept({"size": _NUMBER, "unit": _UNIT, "nodeset": _SET})}
                ),
                "nosharepages": Kept(),
                "locked": Kept(),
                "source": Kept({"type": _words("file", "anonymous", "memfd")}),
                "access": Kept({"mode": _ACCESS}),
                "allocation": Kept({"mode": _words("immediate", "ondemand"), "threads": _NUMBER}),
            }
        ),
        "vcpu": Kept({"placement": _PLACEMENT, "cpuset": _SET, "current": _NUMBER}, _NUMBER),
        "vcpus": Kept(
            children={
                "vcpu": Kept(
                    {
                        "id": _NUMBER,
                        "enabled": _SWITCH,
                        "hotpluggable": _SWITCH,
                        "order": _NUMBER,
                    }
                )
            }
        ),
        "iothreads": Kept(text=_NUMBER),
        "iothreadids": Kept(children={"iothread": Kept({"id": _NUMBER})}),
        "cputune": Kept(
            children={
                "vcpupin": Kept({"vcpu": _NUMBER, "cpuset": _SET}),
                "emulatorpin": Kept({"cpuset": _SET}),
                "iothreadpin": Kept({"iothread": _NUMBER, "cpuset": _SET}),
            }
        ),
        "numatune": Kept(
            children={
                "memory": Kept({"mode": _MODE, "placement": _PLACEMENT, "nodeset": _SET}),
                "memnode": Kept({"cellid": _NUMBER, "mode": _MODE, "nodeset": _SET}),
            }
        ),
        "os": Kept(
            children={
                "type": Kept(
                    {"arch": _words(*_ARCHITECTURES), "machine": _MACHINE},
                    _words("hvm", "xen", "xenpvh", "linux", "exe", "uml"),
                )
            }
        ),
        "cpu": Kept(
            {"mode": _words("custom", "host-model", "host-passthrough", "maximum")},
            children={
                "topology": Kept(
                    dict.fromkeys(("sockets", "dies", "clusters", "cores", "threads"), _NUMBER)
                ),
                "numa": Kept(
                    children={
                        "cell": Kept(
                            {
                                "id": _NUMBER,
                                "cpus": _SET,
                                "memory": _NUMBER,
                                "unit": _UNIT,
                                "memAccess": _ACCESS,
                                "discard": _SWITCH,
                            },
                            children={
                                "distances": Kept(
                                    children={"sibling": Kept({"id": _NUMBER, "value": _NUMBER})}
                                )
                            },
                        )
                    }
                ),
            },
        ),
        "devices": Kept(
            children={
                "emulator": Kept(text=_EMULATOR),
                "hostdev": Kept(
                    {
                        "mode": _words("subsystem", "capabilities"),
                        "type": _words("pci", "usb", "scsi", "scsi_host", "mdev"),
                        "model": _words("vfio-pci", "vfio-ccw", "vfio-ap"),
                        **_HOST_DEVICE,
                    },
                    children={"source": _SOURCE},
                ),
                "interface": Kept(
                    {"type": _words("hostdev"), **_HOST_DEVICE}, children={"source": _SOURCE}
                ),
                "memory": Kept(
                    {"model": _words("dimm", "nvdimm", "virtio-pmem", "virtio-mem", "sgx-epc")},
                    children={
                        "source": Kept(children={"nodemask": Kept(text=_SET), "pagesize": _SIZE}),
                        "target": Kept(
                            children={
                                **dict.fromkeys(("size", "requested", "current", "block"), _SIZE),
                                "node": Kept(text=_NUMBER),
                            }
                        ),
                    },
                ),
            }
        ),
        "launchSecurity": Kept({"type": _words("sev", "sev-snp", "tdx", "s390-pv")}),
    },
)
"""libvirt also checks <name> and <uuid>, which are pseudonyms."""


def redact_domains(text: str, names: Pseudonyms) -> str:
    """The domains of virsh-domains, written again from what the list above lets through.

    Raises ParseError where the text is no XML.
    """
    root = parse_xml(text, "domains", "virsh dumpxml")
    redacted = etree.Element("domains")
    redacted.text = "\n"
    for domain in root.findall("domain"):
        kept = _copy(domain, _DOMAIN)
        identity = []
        for tag, kind in (("name", "vm"), ("uuid", "uuid")):
            secret = (domain.findtext(tag) or "").strip()
            if secret:
                element = etree.Element(tag)
                element.text = (
                    names.uuid(secret) if kind == "uuid" else NAME_PREFIX + names.of(kind, secret)
                )
                identity.append(element)
        for at, element in enumerate(identity):
            kept.insert(at, element)
        for address in kept.iterfind("devices/hostdev/source/address[@uuid]"):
            address.set("uuid", names.uuid(str(address.get("uuid"))))
        emulator = kept.find("devices/emulator")
        if emulator is not None and not emulator.text:
            emulator.text = UNKNOWN_EMULATOR
        kept.tail = "\n"
        redacted.append(kept)
    etree.indent(redacted)
    return etree.tostring(redacted, encoding="unicode") + "\n"


def _copy(element: etree._Element, rule: Kept) -> etree._Element:
    """The element with what its rule lets through; namespaces and comments stay behind."""
    copied = etree.Element(str(element.tag))
    for name, form in rule.attributes.items():
        value = element.get(name)
        if value is not None and form.fullmatch(value):
            copied.set(name, value)
    if rule.text is not None and element.text and rule.text.fullmatch(element.text.strip()):
        copied.text = element.text.strip()
    for child in element:
        # Comments and entities are nodes without a name.
        below = rule.children.get(child.tag) if isinstance(child.tag, str) else None
        if below is not None:
            copied.append(_copy(child, below))
    return copied
