"""Checks of a topology file: how NCCL and RCCL read it, and whether it matches its guest."""

import re
from collections import Counter
from collections.abc import Iterator

from msgspec import Struct

from homenode.cpuset import CpuSet
from homenode.errors import ParseError
from homenode.findings import Finding, Severity, add_source, finding, sort_findings
from homenode.nccl.topology import (
    ADDED_FOR_GPU,
    ADDED_FOR_NIC,
    MAX_ATTRIBUTES,
    NcclTopology,
    NcclVariant,
    ParsedTopology,
    XmlNode,
    read_link_speed,
    read_number,
    read_topology,
    write_topology,
)
from homenode.text import shorten_list

_KNOWN = {
    name: {*words.split()}
    for name, words in {
        "system": "version name",
        "cpu": "numaid affinity affinity_offset arch vendor familyid modelid host_hash",
        "pci": "busid class vendor device subsystem_vendor subsystem_device link_speed link_width",
        "gpu": "dev sm rank gdr mlopart gcn arch mem",
        "nic": "",
        "net": "name dev speed port guid maxconn gdr latency coll gin rma rail plane net",
        "nvlink": "target count tclass",
        "xgmi": "target count tclass",
        "c2c": "bw count",
        "pcilink": "target",
    }.items()
}
"""The attributes of each element."""

_ARCHITECTURES = ("x86_64", "arm64", "ppc64")
_VENDORS = ("GenuineIntel", "AuthenticAMD", "CentaurHauls", "  Shanghai  ")
_BUS_ID = re.compile(
    r"(?:ffff:ff:[0-9a-f]{2}|[0-9a-f]{4}:[0-9a-f]{2}:[01][0-9a-f])\.[0-7]\Z", re.ASCII
)
"""ffff:ff:NN.0 is a virtual switch, of which there may be more than a bus has devices."""

_AFFINITY = re.compile(r"[0-9a-fA-F]{1,8}(?:,[0-9a-fA-F]{8})*\Z", re.ASCII)
_OF_ANY = frozenset({"keep"})
"""NCCL does not trim a branch with keep="1". Source: ncclTopoTrimXmlRec."""

_DEVICE_CLASSES = ("0x02", "0x03", "0x0680")
"""GPU, NIC, NVSwitch and NPU; any other class is a switch to NCCL, as 0x060400 and 0x080100 (Data
Direct of a ConnectX-8) are by name. Source: kvDictPciClass in topo.cc."""

_CLASS = re.compile(r"0x[0-9a-f]{6}\Z", re.ASCII)
_BROADCOM = "0x1000"
_OF_A_DUMP = ("gpu", "nic", "net")
_FEW_CHILDREN = 40
"""MAX_SUBS of NCCL 2.20."""


def check_topology(
    data: bytes, source: str, flavour: NcclVariant | None = None
) -> tuple[Finding, ...]:
    """Return the faults of a file, the worst first. flavour: None = as in the file's version. A
    file that NCCL cannot read has only the finding `nccl-unreadable`."""
    try:
        read = read_topology(data, source)
    except ParseError as error:
        subject = source if error.line is None else f"line {error.line}"
        found_text = "none" if error.found is None else repr(error.found)
        unreadable = finding("nccl-unreadable", subject, error.expected, found_text, source)
        return (unreadable,)
    findings = add_source([*_check_whole(read, flavour), *_check_elements(read, flavour)], source)
    return sort_findings(findings)


def choose_variant(read: ParsedTopology) -> NcclVariant:
    """Return the library that a file's version belongs to; NCCL if neither."""
    versions = {system.get("version") for system in read.systems}
    return NcclVariant.RCCL if versions == {NcclVariant.RCCL.version} else NcclVariant.NCCL


def _check_whole(read: ParsedTopology, flavour: NcclVariant | None) -> Iterator[Finding]:
    if len(read.systems) != 1:
        yield finding(
            "nccl-system", "file", expected="one <system>", observed=str(len(read.systems))
        )
    versions = [v.version for v in NcclVariant if flavour in (None, v)]
    for system in read.systems:
        if system.get("version") not in versions:
            yield finding(
                "nccl-version",
                "<system>",
                expected=" or ".join(f'version="{v}"' for v in versions)
                + (" (RCCL's)" if flavour is NcclVariant.RCCL else ""),
                observed=f'version="{system.get("version")}"',
            )
    if read.ignored:
        yield finding(
            "nccl-ignored",
            shorten_list((f"<{name}> in line {line}" for name, line in read.ignored), 8),
            expected="elements that NCCL reads there",
            observed="ignored, with all that is in it",
        )
    names = Counter(node.name for node in read.walk())
    added_count = 0 if names["gpu"] else ADDED_FOR_GPU
    if not names["nic"]:
        added_count += ADDED_FOR_NIC * sum(_is_nic(node) for node in read.walk("pci"))
    limit = (flavour or choose_variant(read)).most_nodes
    if read.nodes + added_count > limit:
        yield finding(
            "nccl-too-many-nodes",
            "file",
            expected=f"at most {limit} elements with those that NCCL adds",
            observed=f"{read.nodes}, and about {read.nodes + added_count} with them",
        )
    for attribute in ("busid", "numaid"):
        values = [node.get(attribute) for node in read.walk()]
        if attribute == "numaid":  # "01" is 1 as well
            values = [None if (n := read_number(v)) is None else str(n) for v in values]
        for value, count in Counter(values).items():
            if value is not None and count > 1:
                yield finding(
                    f"nccl-{attribute}-twice",
                    f'{attribute}="{value}"',
                    expected="each once",
                    observed=f"{count} times",
                )
    yield from _check_overlaps(read)
    yield from _check_version(read, flavour or choose_variant(read))


def _check_version(read: ParsedTopology, flavour: NcclVariant) -> Iterator[Finding]:
    """Yield findings on elements that some versions do not read."""
    if read.single_quotes:
        is_rccl = flavour is NcclVariant.RCCL
        yield finding(
            "nccl-single-quotes",
            f"line {read.single_quotes[0]}" + (" and others" if read.single_quotes[1:] else ""),
            expected="values in double quotes",
            observed="single quotes",
            severity=Severity.CRITICAL if is_rccl else Severity.WARNING,
            case="RCCL" if is_rccl else None,
        )
    for node in read.walk():
        if len(node.children) > _FEW_CHILDREN:
            yield finding(
                "nccl-children",
                f"<{node.name}> in line {node.line}",
                expected=f"at most {_FEW_CHILDREN} elements in one",
                observed=str(len(node.children)),
            )


def _check_overlaps(read: ParsedTopology) -> Iterator[Finding]:
    """Yield each <cpu> that shares vCPUs with an earlier one, and the first such <cpu>."""
    owner_of: dict[int, tuple[XmlNode, CpuSet]] = {}
    for node in read.walk("cpu"):
        affinity = node.get("affinity") or ""
        mask = CpuSet.parse_mask(affinity) if _AFFINITY.match(affinity) else CpuSet()
        owners = (owner_of[vcpu] for vcpu in mask if vcpu in owner_of)
        other, other_mask = next(owners, (node, CpuSet()))
        if other_mask:
            yield finding(
                "nccl-affinity-shared",
                _format_cpu(node),
                expected=f"vCPUs that differ from those of {_format_cpu(other)}",
                observed=f"vCPUs {mask & other_mask} in both",
            )
        owner_of |= {vcpu: (node, mask) for vcpu in mask if vcpu not in owner_of}


def _check_elements(read: ParsedTopology, flavour: NcclVariant | None) -> Iterator[Finding]:
    flavour = flavour or choose_variant(read)
    yield from _check_dump(read, flavour)
    for node in read.walk():
        yield from _check_attributes(node)
        if node.name == "cpu":
            yield from _check_cpu(node)
        if node.name == "pci":
            yield from _check_pci(node, flavour)


def _check_dump(read: ParsedTopology, flavour: NcclVariant) -> Iterator[Finding]:
    for name in _OF_A_DUMP:
        lines = [node.line for node in read.walk(name)]
        if lines:
            # RCCL's own published VM files have them.
            severity = Severity.WARNING if flavour is NcclVariant.NCCL else Severity.INFO
            yield finding(
                "nccl-dump-file",
                f"<{name}>, first in line {lines[0]}",
                expected="system, cpu and pci alone",
                observed=f"{len(lines)} of them, as in a dump",
                severity=severity,
            )


def _check_attributes(node: XmlNode) -> Iterator[Finding]:
    subject = f"<{node.name}> in line {node.line}"
    if node.surplus:
        yield finding(
            "nccl-attributes",
            subject,
            expected=f"at most {MAX_ATTRIBUTES} attributes",
            observed=f"{MAX_ATTRIBUTES + node.surplus}",
        )
    for key, _ in node.attributes:
        if not key.strip():
            yield finding(
                "nccl-spaces",
                subject,
                expected="one space between attributes, no space before '/>'",
                observed="more",
            )
        elif key not in _KNOWN[node.name] | _OF_ANY:
            yield finding(
                "nccl-attribute-unknown",
                subject,
                expected="attributes that NCCL reads",
                observed=repr(key),
            )
    if node.get("host_hash") is not None:
        yield finding(
            "nccl-dump-file",
            subject,
            expected="no host_hash",
            observed="one, as in a dump",
            case="host_hash",
        )


def _check_cpu(cpu: XmlNode) -> Iterator[Finding]:
    if read_number(cpu.get("numaid")) is None:
        yield finding(
            "nccl-numaid",
            f"<cpu> in line {cpu.line}",
            expected="numaid with the guest's node number",
            observed=repr(cpu.get("numaid")),
        )
    affinity = cpu.get("affinity")
    is_mask = affinity is not None and _AFFINITY.match(affinity)
    if affinity is not None and not (is_mask and affinity.strip("0,")):
        yield finding(
            "nccl-affinity",
            _format_cpu(cpu),
            expected="vCPUs in affinity, as groups of 8 hexadecimal digits such as "
            "0000ffff,ffffffff",
            observed=repr(affinity),
        )
    architecture, vendor = cpu.get("arch"), cpu.get("vendor")
    if architecture is not None and not architecture.startswith(_ARCHITECTURES):
        yield finding(
            "nccl-arch",
            _format_cpu(cpu),
            expected=" or ".join(_ARCHITECTURES),
            observed=repr(architecture),
        )
    is_x86 = architecture is not None and architecture.startswith("x86_64")
    if is_x86 and vendor is not None and not vendor.startswith(_VENDORS):
        yield finding(
            "nccl-vendor",
            _format_cpu(cpu),
            expected=" or ".join(_VENDORS[:2]),
            observed=repr(vendor),
        )
    family, model = cpu.get("familyid"), cpu.get("modelid")
    of_amd_alone = vendor == "AuthenticAMD" and model is None  # NCCL uses AMD's family
    if (family is None) != (model is None) and not of_amd_alone:
        yield finding(
            "nccl-cpu-model",
            _format_cpu(cpu),
            expected="familyid and modelid, or neither",
            observed="familyid alone" if model is None else "modelid alone",
        )


def _check_pci(pci: XmlNode, flavour: NcclVariant) -> Iterator[Finding]:
    bus_id = pci.get("busid")
    if bus_id is None or not _BUS_ID.match(bus_id):
        yield finding(
            "nccl-busid",
            f"<pci> in line {pci.line}",
            expected="busid as the guest's kernel prints it: dddd:bb:dd.f, lower case",
            observed=repr(bus_id),
        )
    is_switch = _is_switch(pci)
    subject = f"<pci> {bus_id or f'in line {pci.line}'}"
    missing = [name for name in ("class", "link_speed", "link_width") if pci.get(name) is None]
    if is_switch and missing:
        yield finding(
            "nccl-switch",
            subject,
            expected="class, link_speed and link_width: guests do not have this switch",
            observed=f"no {', no '.join(missing)}",
        )
    klass = pci.get("class")
    if klass is not None and not _CLASS.match(klass):
        yield finding(
            "nccl-class",
            subject,
            expected="a class such as 0x060400",
            observed=repr(klass),
            severity=Severity.WARNING,
        )
    if is_switch and klass is not None and klass.startswith(_DEVICE_CLASSES):
        yield finding(
            "nccl-class", subject, expected="class 0x060400 on a switch", observed=repr(klass)
        )
    if is_switch and pci.get("vendor") == _BROADCOM and flavour is NcclVariant.NCCL:  # not in RCCL
        yield finding(
            "nccl-switch-vendor",
            subject,
            expected="a vendor other than 0x1000",
            observed="0x1000, Broadcom's",
        )
    yield from _link(pci, subject)


def _link(pci: XmlNode, subject: str) -> Iterator[Finding]:
    speed, width = pci.get("link_speed"), pci.get("link_width")
    if speed is not None and read_link_speed(speed) is None:
        yield finding(
            "nccl-link-speed",
            subject,
            expected="one of NCCL's own texts, such as 16 GT/s or 32.0 GT/s PCIe",
            observed=repr(speed),
        )
    lanes = read_number(width)
    if width is not None and (lanes is None or not 0 < lanes <= 32):
        severity = Severity.CRITICAL if (lanes or 0) < 0 else Severity.WARNING
        yield finding(
            "nccl-link-width",
            subject,
            expected="1 to 32 lanes",
            observed=repr(width),
            severity=severity,
        )


def _is_nic(pci: XmlNode) -> bool:
    return (pci.get("class") or "").startswith("0x02")


def _format_cpu(cpu: XmlNode) -> str:
    return f"<cpu> {cpu.get('numaid')}"


_Link = tuple[float | None, int | None]


class _Place(Struct, frozen=True, kw_only=True):
    """The place of a device in the file."""

    numa_id: str
    affinity: CpuSet | None
    # the devices below its lowest switch, itself included; without a switch only itself
    neighbours: frozenset[str]
    # (GT/s, lanes) of the switches above, from the CPU down, then of the device; None if the
    # guest's sysfs decides
    links: tuple[_Link, ...]


def compare_topology(read: ParsedTopology, expected_topology: NcclTopology) -> tuple[Finding, ...]:
    """Return the differences between a file and the host and guest, the worst first."""
    written_topology = read_topology(write_topology(expected_topology).encode(), read.source)
    findings = [
        *_compare_places(_find_places(read), _find_places(written_topology)),
        *_compare_cpus(read, written_topology),
    ]
    return sort_findings(add_source(findings, read.source))


def _compare_cpus(read: ParsedTopology, expected_topology: ParsedTopology) -> Iterator[Finding]:
    """Yield the attributes from which NCCL computes the bandwidth between CPUs."""
    cpus = {read_number(cpu.get("numaid")): cpu for cpu in reversed([*read.walk("cpu")])}
    for planned_cpu in expected_topology.walk("cpu"):
        cpu = cpus.get(read_number(planned_cpu.get("numaid")))
        for name in ("arch", "vendor", "familyid", "modelid"):
            value, text = planned_cpu.get(name), None if cpu is None else cpu.get(name)
            if value is None or text is None:
                continue
            is_number = name in ("familyid", "modelid")
            if read_number(text) != int(value) if is_number else not text.startswith(value):
                yield finding(
                    "nccl-cpu-differs",
                    f"cpu {planned_cpu.get('numaid')}",
                    expected=f'{name}="{value}"',
                    observed=f'{name}="{text}"',
                )


def _compare_places(places: dict[str, _Place], planned: dict[str, _Place]) -> Iterator[Finding]:
    missing, strange = planned.keys() - places.keys(), sorted(places.keys() - planned.keys())
    is_misnamed = len(missing) == len(strange) == 1
    instead = f"; {strange[0]} is not a device of the guest" if is_misnamed else ""
    for bus_id, place in planned.items():
        actual = places.get(bus_id)
        if actual is None:
            yield finding(
                "nccl-device-missing",
                bus_id,
                expected=f"on cpu {place.numa_id}",
                observed=f"not in the file{instead}",
            )
            continue
        if actual.numa_id != place.numa_id:
            yield finding(
                "nccl-device-on-other-cpu",
                bus_id,
                expected=f"on cpu {place.numa_id}",
                observed=f"on cpu {actual.numa_id}",
            )
        elif actual.affinity is not None and actual.affinity != place.affinity:
            yield finding(
                "nccl-other-vcpus",
                f"cpu {place.numa_id}, of {bus_id}",
                expected=f"vCPUs {place.affinity}",
                observed=f"vCPUs {actual.affinity}",
            )
        if _link_differs(actual.links, place.links):
            yield finding(
                "nccl-link-differs",
                bus_id,
                expected=_format_links(place.links),
                observed=_format_links(actual.links),
            )
        # A missing device is one finding, not a further one for each neighbour.
        if actual.neighbours & planned.keys() != place.neighbours - missing:
            yield finding(
                "nccl-switch-group",
                bus_id,
                expected=_format_group(place.neighbours),
                observed=_format_group(actual.neighbours),
            )
    for bus_id in () if is_misnamed else strange:
        yield finding(
            "nccl-busid-unknown",
            bus_id,
            expected="bus ids of the guest's GPUs and NICs",
            observed="none of them",
        )


def _link_differs(actual: tuple[_Link, ...], planned_links: tuple[_Link, ...]) -> bool:
    """Return whether a link in the file differs from the host's, or is missing."""
    if len(actual) != len(planned_links):
        return True
    return any(
        expected is not None and value != expected
        for planned_link, actual_link in zip(planned_links, actual, strict=True)
        for expected, value in zip(planned_link, actual_link, strict=True)
    )


def _format_links(links: tuple[_Link, ...]) -> str:
    texts = [
        f"{'?' if speed is None else f'{speed:g}'} GT/s x{'?' if width is None else width}"
        for speed, width in links
    ]
    return ", ".join([*(f"switch {text}" for text in texts[:-1]), texts[-1]])


def _format_group(neighbours: frozenset[str]) -> str:
    if len(neighbours) == 1:
        return "alone below its switch or root"
    return f"below one switch: {', '.join(sorted(neighbours))}"


def _find_places(read: ParsedTopology) -> dict[str, _Place]:
    places: dict[str, _Place] = {}

    def visit(
        cpu: XmlNode, affinity: CpuSet | None, around: XmlNode, upper_links: tuple[_Link, ...]
    ) -> None:
        pcis = [child for child in around.children if child.name == "pci"]
        leaves = [pci.get("busid") or "" for pci in pcis if not _is_switch(pci)]
        for pci in pcis:
            links = (*upper_links, _link_of(pci))
            if _is_switch(pci):
                visit(cpu, affinity, pci, links)
            else:
                bus_id = pci.get("busid") or ""
                neighbours = leaves if around is not cpu else [bus_id]
                number = read_number(cpu.get("numaid"))
                numa_id = "" if number is None else str(number)
                places[bus_id] = _Place(
                    numa_id=numa_id,
                    affinity=affinity,
                    neighbours=frozenset(neighbours),
                    links=links,
                )

    for system in read.systems:
        for cpu in (node for node in system.children if node.name == "cpu"):
            visit(cpu, _parse_affinity(cpu), cpu, ())
    return places


def _link_of(pci: XmlNode) -> _Link:
    """Return the link as NCCL reads it: an unknown speed is Gen3, 0 lanes are 16."""
    speed, width = pci.get("link_speed"), read_number(pci.get("link_width"))
    return None if speed is None else read_link_speed(speed) or 8.0, 16 if width == 0 else width


def _parse_affinity(cpu: XmlNode) -> CpuSet | None:
    text = cpu.get("affinity")
    if text is None:
        return None
    try:
        return CpuSet.parse_mask(text)
    except ParseError:
        return CpuSet()


def _is_switch(pci: XmlNode) -> bool:
    return any(child.name == "pci" for child in pci.children)
