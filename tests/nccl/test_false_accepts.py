"""No changed file passes: neither what some version of NCCL or RCCL refuses, nor what is not so."""

import re

import pytest

from homenode.findings import Severity, are_bad
from homenode.nccl.check import check_topology, compare_topology
from homenode.nccl.reader import read_number, read_topology
from homenode.nccl.topology import NcclVariant
from homenode.vm.sources import load_host
from tests.nccl_documents import TWO_CPUS, assembled, text_of, tuned_for

HOST = "hgx-h100"
DEVICES = ("19:00.0", "1a:00.0", "3b:00.0", "9b:00.0", "9c:00.0", "db:00.0")
_VALUE = re.compile(r'(\w+)="([^"]*)"')
NOT_COMPARED = {
    ("pci", "vendor"),
    ("pci", "device"),
    ("pci", "subsystem_vendor"),
    ("pci", "subsystem_device"),
}
"""Of virtual switches: any but Broadcom's is as good."""


def found(text: str, flavour: NcclVariant | None = None) -> dict[str, Severity]:
    return {f.id: f.severity for f in check_topology(text.encode("latin-1"), "t.xml", flavour)}


def replaced(old: str, new: str) -> str:
    assert old in TWO_CPUS
    return TWO_CPUS.replace(old, new, 1)


@pytest.mark.parametrize(
    ("text", "finding", "severity"),
    [
        (replaced('numaid="0"', "numaid='0'"), "nccl-single-quotes", Severity.WARNING),
        (replaced('version="1"', "version='2'"), "nccl-single-quotes", Severity.CRITICAL),
        (replaced('link_width="16"', 'link_width="-1"'), "nccl-link-width", Severity.CRITICAL),
        (replaced('link_width="16"', 'link_width="033"'), "nccl-link-width", None),
        (replaced('link_width="16"', 'link_width="0"'), "nccl-link-width", Severity.WARNING),
        (replaced("0000:81:00.0", "0000:81:00.8"), "nccl-busid", Severity.CRITICAL),
        (replaced("0000:81:00.0", "0000:81:20.0"), "nccl-busid", Severity.CRITICAL),
        (replaced("ffff:ff:01.0", "ffff:ff:fe.0"), "nccl-busid", None),
        (replaced("0000000f", "00000000"), "nccl-affinity", Severity.CRITICAL),
        (replaced("0000000f", "00000000,00000000"), "nccl-affinity", Severity.CRITICAL),
        (replaced('numaid="1"', 'numaid="00"'), "nccl-numaid-twice", Severity.CRITICAL),
        (replaced('numaid="1"', 'numaid="08"'), "nccl-numaid-twice", Severity.CRITICAL),
        (replaced('numaid="1"', 'numaid="01"'), "nccl-numaid", None),
        (replaced("16 GT/s", "16 GT/s per lane"), "nccl-link-speed", None),
        (replaced("16 GT/s", "16.0 GT/s"), "nccl-link-speed", Severity.CRITICAL),
        (replaced('arch="x86_64"', 'arch="x86_64_v3"'), "nccl-arch", None),
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
    """Of a file that homenode wrote, with the host and the guest that it is for."""
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


def test_numbers_are_read_as_c_reads_them() -> None:
    assert [read_number(t) for t in (" 7", "+7", "7 lanes", "0x", "", None)] == [
        7,
        7,
        7,
        0,
        None,
        None,
    ]
