"""Stored documents: what is written can be read, and nothing else can."""

import json
from pathlib import Path

import pytest
from msgspec.structs import replace

from homenode import formats
from homenode.bdf import Bdf
from homenode.cpuset import CoreIndex, CpuSet, NodeIndex, PackageIndex
from homenode.errors import InputError
from homenode.findings import Gap
from homenode.machine.pci import DeviceKind, PciDevice
from homenode.machine.topology import Core, CoreId, CpuModel, Host, NumaNode
from homenode.vm.sources import load_host

HOST = Host(
    name="x86-1p1n1c2t",
    architecture="x86_64",
    cpu=CpuModel(None, None),
    packages=(),
    nodes=(NumaNode(NodeIndex(0), CpuSet([0, 1]), 1 << 30),),
    distances=((10,),),
    llcs=(),
    cores=(Core(CoreIndex(0), CoreId(PackageIndex(0), 0), CpuSet([0, 1])),),
    pus=(),
    pci_devices=(
        PciDevice(Bdf(0, 25, 0, 0), DeviceKind.GPU, 0x030200, None, None, "pci0000:17", None, None),
    ),
    gaps=(Gap("0000:19:00.0 node", "sysfs says -1"),),
)


def test_a_value_survives_being_stored() -> None:
    text = formats.encode("host", HOST)
    assert text.startswith('{\n  "format": "homenode.host/1"')
    assert '"0000:19:00.0"' in text
    assert formats.decode(text, "host", Host, "x.json") == HOST


def test_bytes_that_are_no_utf_8_stand_as_question_marks() -> None:
    """Such as a name in Latin 1 on the kernel's command line."""
    gap = Gap("VMs", "m\udcfcde", device=Bdf(0, 0x19, 0, 0))
    assert formats.line(gap) == formats.line(Gap("VMs", "m?de", device=gap.device))
    host = replace(HOST, name="h\udcfcte", gaps=(gap,))
    stored = formats.decode(formats.encode("host", host), "host", Host, "host")
    assert stored == replace(host, name="h?te", gaps=(Gap("VMs", "m?de", device=gap.device),))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", "expected a homenode.host document"),
        ("[]", 'missing "format": "homenode.host/1"'),
        ('{"format": "homenode.plan/1"}', "expected a homenode.host document"),
        ('{"format": "homenode.host/99"}', "expected homenode.host/1, found version 99"),
        ('{"format": "homenode.host/x"}', "expected a homenode.host document"),
    ],
)
def test_a_foreign_document_is_refused_with_its_reason(text: str, expected: str) -> None:
    with pytest.raises(InputError, match=r"x\.json") as caught:
        formats.decode(text, "host", Host, "x.json")
    assert expected in str(caught.value)


@pytest.mark.parametrize(("field", "named"), [('"19:zz"', "19:zz"), ("3", r"found int.*\.bdf")])
def test_a_bad_field_is_named(field: str, named: str) -> None:
    text = formats.encode("host", HOST).replace('"0000:19:00.0"', field)
    with pytest.raises(InputError, match=named):
        formats.decode(text, "host", Host, "x.json")


@pytest.mark.parametrize("field", ["distances", "pus", "llcs"])
def test_a_host_that_contradicts_itself_is_refused(field: str, tmp_path: Path) -> None:
    document = json.loads(formats.encode("host", load_host("hgx-h100")))
    del document[field][1:]
    (tmp_path / "host.json").write_text(json.dumps(document))
    with pytest.raises(InputError, match="expected"):
        load_host(str(tmp_path / "host.json"))
