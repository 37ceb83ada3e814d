"""Topology files are judged as NCCL and RCCL take them, and no damaged or untrue file passes.

The recorded answers are those of NCCL's own parser (xml.cc of 2.20.5, 2.21.5, 2.30 and of RCCL,
with the limits of each version), compiled outside of the project. What 2.26.6 has in common with
2.20.5 is as in 2.20.5.
"""

import os
import re
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from homenode.errors import ParseError
from homenode.findings import Severity, are_bad
from homenode.nccl.check import check_topology, choose_variant, compare_topology
from homenode.nccl.topology import NcclVariant, XmlNode, read_topology
from homenode.vm.sources import load_host
from tests.nccl.mutants import COUNT, RECORDED, SEED, VERSIONS, marks, mutants, parsed
from tests.nccl_documents import TWO_CPUS, assembled, text_of, tuned_for
from tests.shared_data import needs_shared, shared

PUBLISHED = {
    "EXAMPLE-8gpu-2numa-guest.xml": (19, NcclVariant.NCCL),
    "aws-g5.48xl-topo.xml": (12, NcclVariant.NCCL),
    "aws-p4d-24xl-topo.xml": (19, NcclVariant.NCCL),
    "azure-ndv4-topo.xml": (25, NcclVariant.NCCL),
    "topo_8p_940vm.xml": (99, NcclVariant.RCCL),
}
"""Elements that NCCL keeps of each, and whose it is."""


def broken(old: str, new: str) -> str:
    assert old in TWO_CPUS
    return TWO_CPUS.replace(old, new, 1)


def found(text: str, flavour: NcclVariant | None = None) -> dict[str, Severity]:
    return {f.id: f.severity for f in check_topology(text.encode("latin-1"), "t.xml", flavour)}


@needs_shared
@pytest.mark.parametrize("name", PUBLISHED)
def test_published_files_of_clouds_and_rccl_pass(name: str) -> None:
    data = shared(f"machines/nccl/{name}").read_bytes()
    nodes, flavour = PUBLISHED[name]
    read = read_topology(data, name)
    assert (read.nodes, choose_variant(read)) == (nodes, flavour)
    findings = check_topology(data, name)
    assert not are_bad(findings), findings
    is_dump = flavour is NcclVariant.RCCL
    assert {f.id for f in findings} == ({"nccl-dump-file"} if is_dump else set())


def test_the_file_that_the_tests_break_is_right() -> None:
    assert not found(TWO_CPUS)


UNREADABLE = {
    "a declaration": "<?xml version='1.0'?>\n" + TWO_CPUS,
    "a document type": "<!DOCTYPE system>\n" + TWO_CPUS,
    "a tab before a tag": broken("  <cpu", "\t<cpu"),
    "a tab between attributes": broken('<pci busid="0000:81', '<pci\tbusid="0000:81'),
    "a newline inside a tag": broken('vendor="GenuineIntel" ', 'vendor="GenuineIntel"\n'),
    "a value without quotes": broken('numaid="0"', "numaid=0"),
    "a value of 254 characters": broken('numaid="0"', f'numaid="0" name="{"x" * 254}"'),
    "a name of 254 characters": broken("</cpu>", f"<{'x' * 254} /></cpu>"),
    "an attribute of 255 characters": broken('numaid="0"', f'numaid="0" {"x" * 255}="1"'),
    "an equals sign glued to a comment": "<!--a=b -->\n" + TWO_CPUS,
    "a comment without end": TWO_CPUS + "<!-- more",
    "text between tags": broken("</cpu>", "words</cpu>"),
    "text after the end": TWO_CPUS + "words",
    "another closing tag": broken("</cpu>", "</pci>"),
    "a space in a closing tag": broken("</cpu>", "</cpu >"),
    "an end too early": TWO_CPUS.replace("</system>", ""),
    "a closing tag too many": TWO_CPUS + "</system>",
    "half a tag": TWO_CPUS[:100],
    "a NUL": TWO_CPUS + "\0",
}


@pytest.mark.parametrize("what", UNREADABLE)
def test_what_nccls_parser_refuses_is_refused_with_its_line(what: str) -> None:
    text = UNREADABLE[what]
    assert found(text) == {"nccl-unreadable": Severity.CRITICAL}
    with pytest.raises(ParseError, match=r"t\.xml:\d+: expected"):
        read_topology(text.encode(), "t.xml")


READABLE = {
    "a value of 253 characters": broken('version="1"', f'version="1" name="{"x" * 253}"'),
    "comments": "<!--\n a = b, <c>\n-->\n" + broken("</cpu>", "<!-- end --></cpu><!---->"),
    "everything in one line": TWO_CPUS.replace("\n", ""),
    "carriage returns between tags": TWO_CPUS.replace("\n", "\r\n"),
    "speeds as old kernels print them": broken("32.0 GT/s PCIe", "2.5 GT/s"),
    "a ConnectX-8's Data Direct as a switch": broken("0x060400", "0x080100"),
    "a switch of a class that NCCL does not name": broken("0x060400", "0x060000"),
    "a branch to keep": broken('busid="ffff:ff:01.0"', 'busid="ffff:ff:01.0" keep="1"'),
    "32 GT/s as old kernels print them": broken("32.0 GT/s PCIe", "32 GT/s"),
    "two spaces around Shanghai": broken('"GenuineIntel"', '"  Shanghai  "'),
    "an offset of the affinity": broken('numaid="0"', 'numaid="0" affinity_offset="0"'),
    "AMD's family without model": broken(
        'vendor="GenuineIntel" familyid="6" modelid="143"', 'vendor="AuthenticAMD" familyid="25"'
    ),
}


@pytest.mark.parametrize("what", READABLE)
def test_what_nccls_parser_takes_passes(what: str) -> None:
    assert not found(READABLE[what])


def test_255_elements_fit_and_one_more_does_not() -> None:
    nodes = read_topology(TWO_CPUS.encode(), "t.xml").nodes
    for more, fits in ((255 - nodes, True), (256 - nodes, False)):
        text = broken("</system>", '<cpu numaid="9"/>' * more + "</system>")
        assert ("nccl-unreadable" not in found(text)) is fits


GPU_81 = 'busid="0000:81:00.0" class="0x030200"'
SWITCH = 'busid="ffff:ff:01.0" class="0x060400" vendor="0xffff"'

SILENT = {
    "version 3": (broken('version="1"', 'version="3"'), "nccl-version"),
    "no version": (broken(' version="1"', ""), "nccl-version"),
    "no system": ("<cpus/>\n", "nccl-system"),
    "32.0 GT/s without PCIe": (broken("32.0 GT/s PCIe", "32.0 GT/s"), "nccl-link-speed"),
    "a speed in words": (broken("32.0 GT/s PCIe", "Gen5"), "nccl-link-speed"),
    "width 0": (broken('link_width="16"', 'link_width="0"'), "nccl-link-width"),
    "width x16": (broken('link_width="16"', 'link_width="x16"'), "nccl-link-width"),
    "a switch without class": (broken(' class="0x060400"', ""), "nccl-switch"),
    "a switch without speed": (broken(' link_speed="32.0 GT/s PCIe"', ""), "nccl-switch"),
    "a switch without width": (broken(' link_width="16"', ""), "nccl-switch"),
    "a Broadcom switch": (broken(SWITCH, SWITCH.replace("0xffff", "0x1000")), "nccl-switch-vendor"),
    "a switch with a GPU's class": (broken("0x060400", "0x030200"), "nccl-class"),
    "a switch with an NVSwitch's class": (broken("0x060400", "0x068000"), "nccl-class"),
    "a class without 0x": (broken("0x030200", "030200"), "nccl-class"),
    "a gpu of a dump": (
        broken(
            f'{GPU_81} link_speed="32.0 GT/s PCIe" link_width="16"/>',
            f'{GPU_81}><gpu dev="0" sm="90" rank="0"/></pci>',
        ),
        "nccl-dump-file",
    ),
    "a net of a dump": (
        broken("</cpu>", '<nic><net name="mlx5_0" dev="0"/></nic></cpu>'),
        "nccl-dump-file",
    ),
    "a host_hash": (broken('numaid="0"', 'numaid="0" host_hash="0x1"'), "nccl-dump-file"),
    "no numaid": (broken('numaid="0" ', ""), "nccl-numaid"),
    "one numaid twice": (broken('numaid="1"', 'numaid="0"'), "nccl-numaid-twice"),
    "affinity as a list": (broken('"0000000f"', '"0-3"'), "nccl-affinity"),
    "affinity in groups of 4": (broken('"0000000f"', '"0000,000f"'), "nccl-affinity"),
    "vCPUs on two CPUs": (broken('"000000f0"', '"000000ff"'), "nccl-affinity-shared"),
    "a family without model": (broken(' modelid="143"', ""), "nccl-cpu-model"),
    "the kernel's name of arm64": (broken('"x86_64"', '"aarch64"'), "nccl-arch"),
    "Intel for GenuineIntel": (broken('"GenuineIntel"', '"Intel"'), "nccl-vendor"),
    "a bus id in capitals": (broken("0000:c1:00.0", "0000:C1:00.0"), "nccl-busid"),
    "a bus id without domain": (broken("0000:81:00.0", "81:00.0"), "nccl-busid"),
    "a pci without bus id": (broken(' busid="0000:c1:00.0"', ""), "nccl-busid"),
    "a device twice": (broken("0000:c1:00.0", "0000:81:00.0"), "nccl-busid-twice"),
    "an element that NCCL ignores": (
        broken("</system>", "<nvswitches><nvswitch/></nvswitches></system>"),
        "nccl-ignored",
    ),
    "a misspelt attribute": (broken("link_speed", "link-speed"), "nccl-attribute-unknown"),
    "two spaces": (broken('numaid="0" ', 'numaid="0"  '), "nccl-spaces"),
    "a space before the slash": (broken('"16"/>', '"16" />'), "nccl-spaces"),
    "17 attributes": (
        broken('numaid="0"', 'numaid="0"' + ' vendor="GenuineIntel"' * 12),
        "nccl-attributes",
    ),
    "126 NICs, each to get a nic and a net": (
        broken(
            "</system>",
            '<cpu numaid="2">'
            + "".join(f'<pci busid="0000:{bus:02x}:00.0" class="0x020000"/>' for bus in range(126))
            + "</cpu></system>",
        ),
        "nccl-too-many-nodes",
    ),
}


@pytest.mark.parametrize("what", SILENT)
def test_what_nccl_takes_in_silence_is_named(what: str) -> None:
    text, name = SILENT[what]
    assert name in found(text), found(text)


def test_rccl_takes_version_2_alone_and_nccl_version_1() -> None:
    assert found(TWO_CPUS, NcclVariant.RCCL) == {"nccl-version": Severity.CRITICAL}
    version_2 = broken('version="1"', 'version="2"')
    assert not found(version_2, NcclVariant.RCCL) and not found(version_2)
    assert found(version_2, NcclVariant.NCCL) == {"nccl-version": Severity.CRITICAL}


def test_elements_of_a_dump_are_worse_for_nccl_than_for_rccl() -> None:
    text, name = SILENT["a net of a dump"]
    assert found(text)[name] is Severity.WARNING
    assert found(text.replace('version="1"', 'version="2"'))[name] is Severity.INFO


@pytest.mark.parametrize(
    ("inside", "name", "times"),
    [
        pytest.param("<pci>" * 1000 + "</pci>" * 1000, "nccl-unreadable", 1, id="deep"),
        pytest.param("<a/>" * 1000, "nccl-ignored", 1, id="ignored"),
        pytest.param(
            "".join(f'</cpu><cpu numaid="{node}" affinity="1">' for node in range(100)),
            "nccl-affinity-shared",
            100,
            id="shared",
        ),
    ],
)
def test_a_file_of_many_faults_has_few_findings(inside: str, name: str, times: int) -> None:
    text = f'<system version="2"><cpu affinity="1">{inside}</cpu></system>'
    findings = check_topology(text.encode(), "file")
    assert Counter(finding.id for finding in findings)[name] == times


def test_a_huge_file_is_refused_unread() -> None:
    assert list(found(TWO_CPUS + " " * (1 << 20))) == ["nccl-unreadable"]


@given(st.text(alphabet="<>/!-=\"' \n\tsystemcpu?x0", max_size=60))
def test_any_text_is_read_or_refused(text: str) -> None:
    found(text)


@given(st.integers(0, len(TWO_CPUS) - 1), st.characters(max_codepoint=255))
def test_one_wrong_character_never_breaks_the_check(at: int, character: str) -> None:
    found(TWO_CPUS[:at] + character + TWO_CPUS[at + 1 :])


def test_rccl_does_not_look_for_broadcoms_peer_links() -> None:
    text = broken(SWITCH, SWITCH.replace("0xffff", "0x1000"))
    of_rccl = text.replace('version="1"', 'version="2"')
    for flavour in (None, NcclVariant.RCCL):
        found = check_topology(of_rccl.encode(), "file", flavour)
        assert "nccl-switch-vendor" not in [finding.id for finding in found]


HOST = "hgx-h100"
DEVICES = ("19:00.0", "1a:00.0", "3b:00.0", "9b:00.0", "9c:00.0", "db:00.0")
_VALUE = re.compile(r'(\w+)="([^"]*)"')
NOT_COMPARED = {
    ("pci", "vendor"),
    ("pci", "device"),
    ("pci", "subsystem_vendor"),
    ("pci", "subsystem_device"),
}
"""Attributes of virtual switches: any but Broadcom's is as good."""


@pytest.mark.parametrize(
    ("text", "finding", "severity"),
    [
        (broken('numaid="0"', "numaid='0'"), "nccl-single-quotes", Severity.WARNING),
        (broken('version="1"', "version='2'"), "nccl-single-quotes", Severity.CRITICAL),
        (broken('link_width="16"', 'link_width="-1"'), "nccl-link-width", Severity.CRITICAL),
        (broken('link_width="16"', 'link_width="033"'), "nccl-link-width", None),
        (broken('link_width="16"', 'link_width="0"'), "nccl-link-width", Severity.WARNING),
        (broken("0000:81:00.0", "0000:81:00.8"), "nccl-busid", Severity.CRITICAL),
        (broken("0000:81:00.0", "0000:81:20.0"), "nccl-busid", Severity.CRITICAL),
        (broken("ffff:ff:01.0", "ffff:ff:fe.0"), "nccl-busid", None),
        (broken("0000000f", "00000000"), "nccl-affinity", Severity.CRITICAL),
        (broken("0000000f", "00000000,00000000"), "nccl-affinity", Severity.CRITICAL),
        (broken('numaid="1"', 'numaid="00"'), "nccl-numaid-twice", Severity.CRITICAL),
        (broken('numaid="1"', 'numaid="08"'), "nccl-numaid-twice", Severity.CRITICAL),
        (broken('numaid="1"', 'numaid="01"'), "nccl-numaid", None),
        (broken("16 GT/s", "16 GT/s per lane"), "nccl-link-speed", None),
        (broken("16 GT/s", "16.0 GT/s"), "nccl-link-speed", Severity.CRITICAL),
        (broken('arch="x86_64"', 'arch="x86_64_v3"'), "nccl-arch", None),
    ],
)
def test_what_a_version_refuses_or_reads_otherwise_is_found(
    text: str, finding: str, severity: Severity | None
) -> None:
    assert found(text).get(finding) is severity


@pytest.mark.parametrize(("children", "is_found"), [(40, False), (41, True), (129, True)])
def test_more_children_than_older_versions_take_are_found(children: int, is_found: bool) -> None:
    pcis = "".join(
        f'    <pci busid="0000:{0x10 + i:02x}:00.0" class="0x020000"/>\n' for i in range(children)
    )
    text = f'<system version="1">\n  <cpu numaid="0">\n{pcis}  </cpu>\n</system>\n'
    assert ("nccl-children" in found(text)) == is_found


def test_rccl_takes_more_elements_than_nccl() -> None:
    cpus = "".join(f'<cpu numaid="{i}"/>' for i in range(400))
    assert "nccl-unreadable" in found(f'<system version="1">{cpus}</system>')
    assert "nccl-unreadable" not in found(f'<system version="2">{cpus}</system>')
    many = "".join(f'<cpu numaid="{i}"/>' for i in range(600))
    assert set(found(f'<system version="2">{many}</system>')) == {"nccl-children"}


def test_every_value_that_is_changed_in_a_files_is_noticed() -> None:
    """A file that homenode wrote, with the host and the guest that it is for."""
    made = assembled(load_host(HOST), tuned_for(HOST, DEVICES))
    text = text_of(made)
    read = read_topology(text.encode(), "t.xml")
    assert not are_bad(compare_topology(read, made.topology))
    unnoticed: set[tuple[str, str]] = set()
    changed = 0
    for line in re.finditer(r"<(\w+)( [^>]*)>", text):
        for attribute in _VALUE.finditer(line[2]):
            at = line.start(2) + attribute.start(2)
            for value in others(attribute[1], attribute[2]):
                mutated = text[:at] + value + text[at + len(attribute[2]) :]
                changed += 1
                data = mutated.encode()
                bad = list(check_topology(data, "t.xml"))
                if not any(f.id == "nccl-unreadable" for f in bad):
                    bad += compare_topology(read_topology(data, "t.xml"), made.topology)
                if not are_bad(bad):
                    unnoticed.add((line[1], attribute[1]))
    assert changed > 80
    # A version of RCCL's is refused with the GPUs; the class of a device is the guest's to say.
    assert unnoticed <= NOT_COMPARED | {("pci", "class"), ("system", "version")}, unnoticed


def others(name: str, value: str) -> list[str]:
    """Values that are right in form and not the same."""
    if name == "link_speed":
        return [v for v in ("8.0 GT/s PCIe", "32.0 GT/s PCIe", "16 GT/s") if v[:3] != value[:3]]
    if name == "busid":
        return ["0000:7e:00.0"] if not value.startswith("ffff") else []
    if name == "affinity":
        return ["00000001", "ffffffff"]
    if name in ("arch", "vendor"):
        return {"x86_64": ["arm64"], "AuthenticAMD": ["GenuineIntel"]}.get(value, ["0xfffe"])
    if value.startswith("0x"):
        return [f"{int(value, 16) ^ 1:#0{len(value)}x}"]
    return [str(int(value) + 1), f"0{int(value) + 1:o}"]


_NEWEST = {NcclVariant.NCCL: "nccl-2.30.7", NcclVariant.RCCL: "rccl"}
_ENDED_OTHERWISE = ("a value of", "a quote after", "more of a tag")
"""Expected of a value that opens with ' : RCCL lets any " end it."""


def wrong(files: list[bytes], accepted: list[frozenset[str]]) -> tuple[Counter[str], list[str]]:
    """Files that the check takes and a version refuses, by version; and what was expected of files
    that the check cannot read and the newest version takes."""
    false_accepts: Counter[str] = Counter()
    false_refusals: list[str] = []
    for data, takers in zip(files, accepted, strict=True):
        for flavour, newest in _NEWEST.items():
            found = check_topology(data, "t.xml", flavour)
            if not any(one.is_bad for one in found):
                of_flavour = {v for v in VERSIONS if (v == "rccl") == (flavour is NcclVariant.RCCL)}
                false_accepts.update(of_flavour - takers)
            unreadable = [one for one in found if one.id == "nccl-unreadable"]
            if unreadable and newest in takers:
                false_refusals.append(unreadable[0].expected)
    return false_accepts, false_refusals


def has_a_reason(expected: str) -> bool:
    """Closing tags with nothing open, which NCCL takes in pairs, and quotes that RCCL mixes."""
    return expected.startswith(("no closing tag", *_ENDED_OTHERWISE))


def test_no_file_passes_that_a_version_refuses() -> None:
    recorded = RECORDED.read_text().strip()
    bits = [int(mark, 32) for mark in recorded]
    accepted = [frozenset(v for i, v in enumerate(VERSIONS) if one >> i & 1) for one in bits]
    assert len(accepted) == COUNT
    assert all(50 < sum(v in one for one in accepted) < COUNT - 50 for v in VERSIONS)
    false_accepts, false_refusals = wrong(mutants(SEED, COUNT), accepted)
    assert not false_accepts
    assert all(map(has_a_reason, false_refusals)), false_refusals
    assert len(false_refusals) < COUNT // 50


def as_text(node: XmlNode) -> str:
    attributes = "".join(f" {name}={value};" for name, value in node.attributes)
    inside = "".join(as_text(child) for child in node.children if child.name != "xgmi")
    return f"({node.name}{attributes}{inside})"


@pytest.mark.lab
def test_files_are_read_as_by_nccls_parser() -> None:
    directory = os.environ.get("HOMENODE_NCCL_PARSERS")
    if directory is None:
        pytest.skip("HOMENODE_NCCL_PARSERS names no directory of parsers: see mutants.parsed")
    assert marks(parsed(Path(directory), mutants(SEED, COUNT))) == RECORDED.read_text().strip()
    files = mutants(1, 20_000)
    found = parsed(Path(directory), files)
    accepted = [
        frozenset(v for v, tree in zip(VERSIONS, of_file, strict=True) if tree is not None)
        for of_file in zip(*found, strict=True)
    ]
    false_accepts, false_refusals = wrong(files, accepted)
    assert not false_accepts
    assert all(map(has_a_reason, false_refusals)), Counter(false_refusals)
    trees = found[VERSIONS.index("nccl-2.30.7")]
    for data, tree in zip(files, trees, strict=True):
        try:
            read = read_topology(data, "t.xml")
        except ParseError:
            continue
        if tree is not None:
            assert "".join(map(as_text, read.systems)) == tree, data
