"""The study's listings A, B and C: applied to a sample document, element for element."""

import re
from collections.abc import Iterator

import pytest

from homenode.cpuset import CpuSet
from homenode.units import MIB
from homenode.vm.domain.document import Element, parse_document
from homenode.vm.domain.read import read_vm
from homenode.vm.plan import Plan
from homenode.vm.targets.libvirt import rewrite
from tests.domain_corpus import sample
from tests.domain_plans import hand_plan
from tests.shared_data import SHARED

LAYOUTS = {"A": "pin", "B": "pin-numa", "C": "pin-numa-smt"}
Shown = tuple[str, tuple[tuple[str, str], ...], str, tuple[object, ...]]


def shown(element: Element) -> Shown:
    """An element as a value: name, attributes in order, text, children in order."""
    children = tuple(shown(child) for child in element.children)
    return element.name, element.attributes, element.text.strip(), children


def study_plan(listing: str) -> Plan:
    guest = read_vm(sample("study"), "vm.xml")
    emulator = CpuSet.parse("28,29,92,93" if listing == "C" else "28,29")
    return hand_plan(
        guest,
        LAYOUTS[listing],
        vcpus=112 if listing == "C" else 56,
        memory_bytes=1572864 * MIB,
        emulator_pus=emulator,
        distances=False,
    )


def attributes(**values: str) -> tuple[tuple[str, str], ...]:
    return tuple(values.items())


def expected_pins(listing: str) -> Iterator[tuple[int, int]]:
    """(vCPU, CPU): cores 0-27 of node 0, then 32-59 of node 1; in C each before its sibling."""
    vcpu = 0
    for core in (*range(28), *range(32, 60)):
        for pu in (core, core + 64) if listing == "C" else (core,):
            yield vcpu, pu
            vcpu += 1


@pytest.mark.parametrize("listing", LAYOUTS)
def test_the_listing_is_equal_element_for_element(listing: str) -> None:
    count = 112 if listing == "C" else 56
    root = parse_document(rewrite(sample("study"), study_plan(listing)), listing).root
    vcpu, cputune, cpu, numatune = (
        root.child(name) for name in ("vcpu", "cputune", "cpu", "numatune")
    )
    assert vcpu is not None
    assert cputune is not None
    assert cpu is not None
    assert shown(vcpu) == ("vcpu", (("placement", "static"),), str(count), ())
    emulator = "28,29,92,93" if listing == "C" else "28,29"
    assert [shown(child) for child in cputune.children] == [
        ("emulatorpin", (("cpuset", emulator),), "", ()),
        *(
            ("vcpupin", attributes(vcpu=str(v), cpuset=str(pu)), "", ())
            for v, pu in expected_pins(listing)
        ),
    ]
    mode = attributes(mode="host-passthrough", check="none", migratable="on")
    if listing == "A":
        assert shown(cpu) == ("cpu", mode, "", ())
        assert numatune is None
        return
    threads = "2" if listing == "C" else "1"
    half = count // 2
    cells = tuple(
        (
            "cell",
            attributes(
                id=str(i), cpus=f"{i * half}-{i * half + half - 1}", memory="786432", unit="MiB"
            ),
            "",
            (),
        )
        for i in (0, 1)
    )
    topology = attributes(sockets="2", cores="28", threads=threads)
    assert shown(cpu) == (
        "cpu",
        mode,
        "",
        (("topology", topology, "", ()), ("numa", (), "", cells)),
    )
    assert numatune is not None
    assert shown(numatune) == (
        "numatune",
        (),
        "",
        (
            ("memory", attributes(mode="strict", nodeset="0,1"), "", ()),
            ("memnode", attributes(cellid="0", mode="strict", nodeset="0"), "", ()),
            ("memnode", attributes(cellid="1", mode="strict", nodeset="1"), "", ()),
        ),
    )


@pytest.mark.parametrize("listing", LAYOUTS)
def test_every_element_that_the_study_prints_is_in_the_document(listing: str) -> None:
    directory = SHARED / "seeds"
    texts = sorted(directory.glob("000_*.txt")) if directory.is_dir() else []
    if not texts:
        pytest.skip(f"the study's text is not in {directory}")
    text = texts[0].read_text()
    part = re.split(r"\nConfig ([ABC]) — ", text)
    block = dict(zip(part[1::2], part[2::2], strict=True))[listing].split("Issues Found")[0]
    printed = re.findall(
        r"<(?:vcpu|emulatorpin|vcpupin|topology|cell|memory|memnode)\b[^>]*/?>", block
    )
    assert len(printed) > 4
    after = rewrite(sample("study"), study_plan(listing)).decode()
    assert [tag for tag in printed if tag not in after] == []


def test_a_document_that_breaks_the_studys_script_works_too() -> None:
    xml = (
        sample("study")
        .replace(b"<vcpu placement='static'>56</vcpu>", b"<vcpu cpuset='0-3' current='2'>94</vcpu>")
        .replace(
            b"<cpu mode='host-passthrough' check='none' migratable='on'/>",
            b"<cpu mode='host-passthrough' check='none' migratable='on'>"
            b"<topology sockets='1' cores='94' threads='1'/>"
            b"<feature policy='require' name='pdpe1gb'/></cpu>",
        )
    )
    after = rewrite(xml, study_plan("A"))
    assert b"<vcpu placement='static'>56</vcpu>" in after
    assert b"migratable='on'><feature policy='require' name='pdpe1gb'/></cpu>" in after
