"""Checks: a topology file against what NCCL and RCCL make of it, most of it in silence."""

import re
from collections import Counter
from collections.abc import Iterator

from homenode.cpuset import CpuSet
from homenode.errors import ParseError
from homenode.findings import Finding, Severity, in_order
from homenode.nccl.strict_reader import (
    MOST_ATTRIBUTES,
    ReadTopology,
    XmlNode,
    read_link_speed,
    read_number,
    read_topology,
)
from homenode.nccl.topology import Flavour

_KNOWN = {
    "system": {"version", "name"},
    "cpu": {
        "numaid",
        "affinity",
        "affinity_offset",
        "arch",
        "vendor",
        "familyid",
        "modelid",
        "host_hash",
    },
    "pci": {
        "busid",
        "class",
        "vendor",
        "device",
        "subsystem_vendor",
        "subsystem_device",
        "link_speed",
        "link_width",
    },
    "gpu": {"dev", "sm", "rank", "gdr", "mlopart", "gcn", "arch", "mem"},
    "nic": set[str](),
    "net": {
        "name",
        "dev",
        "speed",
        "port",
        "guid",
        "maxconn",
        "gdr",
        "latency",
        "coll",
        "gin",
        "rma",
        "rail",
        "plane",
        "net",
    },
    "nvlink": {"target", "count", "tclass"},
    "xgmi": {"target", "count", "tclass"},
    "c2c": {"bw", "count"},
    "pcilink": {"target"},
}
_ARCHITECTURES = ("x86_64", "arm64", "ppc64")
_VENDORS = ("GenuineIntel", "AuthenticAMD", "CentaurHauls", "  Shanghai  ")
_BUS_ID = re.compile(
    r"(?:ffff:ff:[0-9a-f]{2}|[0-9a-f]{4}:[0-9a-f]{2}:[01][0-9a-f])\.[0-7]\Z", re.ASCII
)
"""ffff:ff:NN.0 is a virtual switch, of which there may be more than a bus has devices."""

_AFFINITY = re.compile(r"[0-9a-fA-F]{1,8}(?:,[0-9a-fA-F]{8})*\Z", re.ASCII)
_OF_ANY = frozenset({"keep"})
"""NCCL leaves a branch with keep="1" in, whatever is below. Source: ncclTopoTrimXmlRec."""

_DEVICE_CLASSES = ("0x02", "0x03", "0x0680")
"""GPU, NIC, NVSwitch and NPU; any other class is a switch to NCCL, as 0x060400 and 0x080100 (Data
Direct of a ConnectX-8) are by name. Source: kvDictPciClass in topo.cc."""

_CLASS = re.compile(r"0x[0-9a-f]{6}\Z", re.ASCII)
_BROADCOM = "0x1000"
_OF_A_DUMP = ("gpu", "nic", "net")
_REWRITE = "let homenode nccl-topo write the file"
_FEW_CHILDREN, _MANY_CHILDREN = 40, 128
"""MAX_SUBS of NCCL 2.20 and of 2.21 to 2.26."""

_ADDED_FOR_GPU = 2  # <gpu>, and at least one <nvlink>
_ADDED_FOR_NIC = 2  # <nic> and <net>
Found = Iterator[Finding]


def check_topology(data: bytes, source: str, flavour: Flavour | None = None) -> tuple[Finding, ...]:
    """What is wrong with a file, the worst first. flavour: None = as the file's version says.

    A file that NCCL cannot read at all gives one finding, `nccl-unreadable`.
    """
    try:
        read = read_topology(data, source)
    except ParseError as error:
        where = source if error.line is None else f"line {error.line}"
        return (
            Finding(
                id="nccl-unreadable",
                severity=Severity.CRITICAL,
                subject=where,
                expected=error.expected,
                observed=repr(error.found),
                cost="ncclCommInitRank fails",
                fix=_REWRITE,
                source=source,
            ),
        )
    return in_order([*_whole(read, flavour), *_elements(read, flavour)])


def flavour_of(read: ReadTopology) -> Flavour:
    """Which library a file is for, by its version; NCCL where it has neither's."""
    versions = {system.get("version") for system in read.systems}
    return Flavour.RCCL if versions == {Flavour.RCCL.version} else Flavour.NCCL


def _whole(read: ReadTopology, flavour: Flavour | None) -> Found:
    if len(read.systems) != 1:
        yield _finding(
            read,
            "nccl-system",
            Severity.CRITICAL,
            "file",
            "one <system>",
            str(len(read.systems)),
            "NCCL has nothing to go by",
            _REWRITE,
        )
    expected = [one.version for one in Flavour if flavour in (None, one)]
    for system in read.systems:
        if system.get("version") not in expected:
            yield _finding(
                read,
                "nccl-version",
                Severity.CRITICAL,
                "<system>",
                " or ".join(f'version="{v}"' for v in expected)
                + (" (RCCL's)" if flavour is Flavour.RCCL else ""),
                f'version="{system.get("version")}"',
                "ncclCommInitRank fails: invalid usage",
                "1 is NCCL's, 2 is RCCL's (--rccl)",
            )
    for ignored in read.ignored:
        yield _finding(
            read,
            "nccl-ignored",
            Severity.WARNING,
            f"<{ignored.name}> in line {ignored.line}",
            "elements that NCCL reads there",
            "one that it ignores, with all that is in it",
            "what it says does not count",
            _REWRITE,
        )
    names = Counter(node.name for system in read.systems for node in system.walk())
    more = 0 if names["gpu"] else _ADDED_FOR_GPU
    if not names["nic"]:
        more += _ADDED_FOR_NIC * sum(_is_nic(node) for node in _named(read, "pci"))
    most = (flavour or flavour_of(read)).most_nodes
    if read.nodes + more > most:
        yield _finding(
            read,
            "nccl-too-many-nodes",
            Severity.WARNING,
            "file",
            f"at most {most} elements with those that NCCL adds",
            f"{read.nodes}, and about {read.nodes + more} with them",
            "NCCL fails with 'too many XML nodes'",
            "leave out devices that jobs do not use",
        )
    for attribute, cost in (
        ("busid", "NCCL takes the first one: the device may be on the wrong node"),
        ("numaid", "NCCL makes two CPUs with one number, and ncclCommInitRank may fail"),
    ):
        nodes = [node for system in read.systems for node in system.walk()]
        values = [node.get(attribute) for node in nodes]
        if attribute == "numaid":  # "01" is 1 as well
            values = [None if (n := read_number(v)) is None else str(n) for v in values]
        for value, count in Counter(values).items():
            if value is not None and count > 1:
                yield _finding(
                    read,
                    f"nccl-{attribute}-twice",
                    Severity.CRITICAL,
                    f'{attribute}="{value}"',
                    "each once",
                    f"{count} times",
                    cost,
                    "keep the right one",
                )
    yield from _overlaps(read)
    yield from _of_versions(read, flavour or flavour_of(read))


def _of_versions(read: ReadTopology, flavour: Flavour) -> Found:
    """What some versions do not read."""
    if read.single_quotes:
        is_rccl = flavour is Flavour.RCCL
        yield _finding(
            read,
            "nccl-single-quotes",
            Severity.CRITICAL if is_rccl else Severity.WARNING,
            f"line {read.single_quotes[0]}" + (" and others" if read.single_quotes[1:] else ""),
            "values in double quotes",
            "single quotes",
            "RCCL fails on it" if is_rccl else "NCCL up to 2.26 fails on it",
            _REWRITE,
        )
    for system in read.systems:
        for node in system.walk():
            if len(node.children) > _FEW_CHILDREN:
                many = len(node.children) > _MANY_CHILDREN
                yield _finding(
                    read,
                    "nccl-children",
                    Severity.WARNING,
                    f"<{node.name}> in line {node.line}",
                    f"at most {_FEW_CHILDREN} elements in one",
                    str(len(node.children)),
                    "NCCL 2.20 crashes on it" + (", 2.21 to 2.26 fail" if many else ""),
                    "take NCCL 2.27 or newer, or leave out devices that jobs do not use",
                )


def _overlaps(read: ReadTopology) -> Found:
    masks = [
        (node, CpuSet.parse_mask(node.get("affinity") or ""))
        for node in _named(read, "cpu")
        if _AFFINITY.match(node.get("affinity") or "")
    ]
    for i, (node, mask) in enumerate(masks):
        for other, others in masks[:i]:
            if not mask.isdisjoint(others):
                yield _finding(
                    read,
                    "nccl-affinity-shared",
                    Severity.INFO,
                    _cpu(node),
                    f"other vCPUs than {_cpu(other)}",
                    f"vCPUs {mask & others} in both",
                    "NCCL's threads may run far from their GPU",
                    "pin the vCPUs, some on each node that has devices",
                )


def _elements(read: ReadTopology, flavour: Flavour | None) -> Found:
    flavour = flavour or flavour_of(read)
    yield from _of_a_dump(read, flavour)
    for system in read.systems:
        for node in system.walk():
            yield from _attributes(read, node)
            if node.name == "cpu":
                yield from _cpu_checks(read, node)
            if node.name == "pci":
                yield from _pci_checks(read, node, flavour)


def _of_a_dump(read: ReadTopology, flavour: Flavour) -> Found:
    for name in _OF_A_DUMP:
        lines = [node.line for node in _named(read, name)]
        if lines:
            # RCCL's own published VM files have them.
            severity = Severity.WARNING if flavour is Flavour.NCCL else Severity.INFO
            yield _finding(
                read,
                "nccl-of-a-dump",
                severity,
                f"<{name}>, first in line {lines[0]}",
                "system, cpu and pci alone",
                f"{len(lines)} of them, as in a dump",
                "ranks, device numbers, links and GUIDs are those of the machine it was taken on",
                "leave them out: NCCL detects them in the guest",
            )


def _attributes(read: ReadTopology, node: XmlNode) -> Found:
    where = f"<{node.name}> in line {node.line}"
    if node.surplus:
        yield _finding(
            read,
            "nccl-attributes",
            Severity.WARNING,
            where,
            f"at most {MOST_ATTRIBUTES} attributes",
            f"{MOST_ATTRIBUTES + node.surplus}",
            "NCCL drops the last ones",
            _REWRITE,
        )
    for key, _ in node.attributes:
        if not key.strip():
            yield _finding(
                read,
                "nccl-spaces",
                Severity.WARNING,
                where,
                "one space between attributes, none before '/>'",
                "more",
                "each takes one of 16 places for attributes",
                _REWRITE,
            )
        elif key not in _KNOWN[node.name] | _OF_ANY:
            yield _finding(
                read,
                "nccl-attribute-unknown",
                Severity.WARNING,
                where,
                "attributes that NCCL reads",
                repr(key),
                "NCCL takes no notice",
                "look for a misspelling, or a tab",
            )
    if node.get("host_hash") is not None:
        yield _finding(
            read,
            "nccl-of-a-dump",
            Severity.WARNING,
            where,
            "no host_hash",
            "one, as in a dump",
            "NCCL puts its own in its place",
            "leave it out",
        )


def _cpu_checks(read: ReadTopology, cpu: XmlNode) -> Found:
    if read_number(cpu.get("numaid")) is None:
        yield _finding(
            read,
            "nccl-numaid",
            Severity.CRITICAL,
            f"<cpu> in line {cpu.line}",
            "numaid with the guest's node number",
            repr(cpu.get("numaid")),
            "ncclCommInitRank fails",
            _REWRITE,
        )
    affinity = cpu.get("affinity")
    is_mask = affinity is not None and _AFFINITY.match(affinity)
    if affinity is not None and not (is_mask and affinity.strip("0,")):
        yield _finding(
            read,
            "nccl-affinity",
            Severity.CRITICAL,
            _cpu(cpu),
            "vCPUs in affinity, as groups of 8 hexadecimal digits such as 0000ffff,ffffffff",
            repr(affinity),
            "NCCL pins its threads to other vCPUs, or to none",
            _REWRITE,
        )
    architecture, vendor = cpu.get("arch"), cpu.get("vendor")
    if architecture is not None and not architecture.startswith(_ARCHITECTURES):
        yield _finding(
            read,
            "nccl-arch",
            Severity.WARNING,
            _cpu(cpu),
            " or ".join(_ARCHITECTURES),
            repr(architecture),
            "NCCL computes wrong bandwidths between nodes",
            _REWRITE,
        )
    is_x86 = architecture is not None and architecture.startswith("x86_64")
    if is_x86 and vendor is not None and not vendor.startswith(_VENDORS):
        yield _finding(
            read,
            "nccl-vendor",
            Severity.WARNING,
            _cpu(cpu),
            " or ".join(_VENDORS[:2]),
            repr(vendor),
            "NCCL computes wrong bandwidths between nodes",
            _REWRITE,
        )
    family, model = cpu.get("familyid"), cpu.get("modelid")
    of_amd_alone = vendor == "AuthenticAMD" and model is None  # NCCL goes by AMD's family
    if (family is None) != (model is None) and not of_amd_alone:
        yield _finding(
            read,
            "nccl-cpu-model",
            Severity.CRITICAL,
            _cpu(cpu),
            "familyid and modelid, or neither",
            "familyid alone" if model is None else "modelid alone",
            "NCCL finds no modelid and ncclCommInitRank fails"
            if model is None
            else "NCCL puts the guest's own in its place",
            _REWRITE,
        )


def _pci_checks(read: ReadTopology, pci: XmlNode, flavour: Flavour) -> Found:
    bus_id = pci.get("busid")
    if bus_id is None or not _BUS_ID.match(bus_id):
        yield _finding(
            read,
            "nccl-busid",
            Severity.CRITICAL,
            f"<pci> in line {pci.line}",
            "busid as the guest's kernel prints it: dddd:bb:dd.f, lower case",
            repr(bus_id),
            "no device has it: NCCL leaves the branch out and goes by the guest's own tree",
            _REWRITE,
        )
    is_switch = any(child.name == "pci" for child in pci.children)
    where = _pci(pci)
    missing = [name for name in ("class", "link_speed", "link_width") if pci.get(name) is None]
    if is_switch and missing:
        yield _finding(
            read,
            "nccl-switch",
            Severity.CRITICAL,
            where,
            "class, link_speed and link_width: no guest has this switch to ask",
            f"no {', no '.join(missing)}",
            "ncclCommInitRank fails without a class; without a speed it counts as Gen3",
            _REWRITE,
        )
    klass = pci.get("class")
    if klass is not None and not _CLASS.match(klass):
        yield _finding(
            read,
            "nccl-class",
            Severity.WARNING,
            where,
            "a class such as 0x060400",
            repr(klass),
            "NCCL takes it for a switch",
            _REWRITE,
        )
    if is_switch and klass is not None and klass.startswith(_DEVICE_CLASSES):
        yield _finding(
            read,
            "nccl-class",
            Severity.CRITICAL,
            where,
            "class 0x060400 on a switch",
            repr(klass),
            "NCCL takes the switch for a device",
            _REWRITE,
        )
    if is_switch and pci.get("vendor") == _BROADCOM and flavour is Flavour.NCCL:  # not in RCCL
        yield _finding(
            read,
            "nccl-switch-vendor",
            Severity.WARNING,
            where,
            "a vendor other than 0x1000",
            "0x1000, Broadcom's",
            "NCCL looks for peer links between such switches, and flattens them",
            "vendor 0xffff",
        )
    yield from _link(read, pci, where)


def _link(read: ReadTopology, pci: XmlNode, where: str) -> Found:
    speed, width = pci.get("link_speed"), pci.get("link_width")
    if speed is not None and read_link_speed(speed) is None:
        yield _finding(
            read,
            "nccl-link-speed",
            Severity.CRITICAL,
            where,
            "one of NCCL's own texts, such as 16 GT/s or 32.0 GT/s PCIe",
            repr(speed),
            "NCCL counts it as Gen3, without a warning",
            "32.0 GT/s without PCIe, for example, is none of them",
        )
    lanes = read_number(width)
    if width is not None and (lanes is None or not 0 < lanes <= 32):
        severity = Severity.CRITICAL if (lanes or 0) < 0 else Severity.WARNING
        yield _finding(
            read,
            "nccl-link-width",
            severity,
            where,
            "1 to 32 lanes",
            repr(width),
            "NCCL counts 0 as 16, and a text as what it begins with",
            _REWRITE,
        )


def _finding(
    read: ReadTopology,
    id: str,
    severity: Severity,
    subject: str,
    expected: str,
    observed: str,
    cost: str,
    fix: str,
) -> Finding:
    return Finding(
        id=id,
        severity=severity,
        subject=subject,
        expected=expected,
        observed=observed,
        cost=cost,
        fix=fix,
        source=read.source,
    )


def _named(read: ReadTopology, name: str) -> Iterator[XmlNode]:
    for system in read.systems:
        yield from (node for node in system.walk() if node.name == name)


def _is_nic(pci: XmlNode) -> bool:
    return (pci.get("class") or "").startswith("0x02")


def _cpu(cpu: XmlNode) -> str:
    return f"<cpu> {cpu.get('numaid')}"


def _pci(pci: XmlNode) -> str:
    return f"<pci> {pci.get('busid') or f'in line {pci.line}'}"
