"""A VM that its host cannot hold, or that libvirt refuses, does not verify."""

import shutil
from pathlib import Path

import pytest
from msgspec.structs import replace

from homenode.check.domain.verification import verify_document
from homenode.check.verify.verification import VerifyRequest, verify
from homenode.findings import Finding, Severity, are_bad
from homenode.machine.topology import PagePool
from homenode.units import GIB, MIB
from homenode.vm.domain.read import open_domain
from homenode.vm.domain.schema import SchemaError, parse_with_libvirt
from tests.kubevirt_documents import document as kubevirt_document
from tests.verify_documents import PLAIN, changed, findings_of, small_host

NO_DEVICES = PLAIN[: PLAIN.index(b"    <hostdev")] + b"  </devices></domain>"
HUGE = "<memoryBacking><hugepages><page size='2' unit='MiB'/></hugepages></memoryBacking><vcpu "


def named(findings: tuple[Finding, ...]) -> dict[str, Severity]:
    return {one.id: one.severity for one in findings if are_bad([one])}


def test_an_unbound_vm_needs_memory_huge_pages_and_pus_of_the_whole_host() -> None:
    more = changed(NO_DEVICES, (">4</memory>", ">400</memory>"), (">4</vcpu>", ">88</vcpu>"))
    found = named(findings_of(more, host=small_host()))
    assert found == {"memory-short": Severity.CRITICAL, "vcpus-above-cpus": Severity.WARNING}
    locked = changed(PLAIN, (">4</memory>", ">400</memory>"))
    assert named(findings_of(locked, host=small_host())) == {"memory-short": Severity.CRITICAL}
    assert not named(findings_of(PLAIN, host=small_host()))


@pytest.mark.parametrize(("pages", "short"), [(2047, True), (2048, False)])
def test_huge_pages_of_an_unbound_vm_may_come_from_any_node(pages: int, short: bool) -> None:
    pool = PagePool(2 * MIB, pages // 2, pages // 2)
    rest = PagePool(2 * MIB, pages - pages // 2, pages - pages // 2)
    first, second = small_host().nodes
    host = replace(
        small_host(),
        nodes=(replace(first, page_pools=(pool,)), replace(second, page_pools=(rest,))),
    )
    document = changed(NO_DEVICES, ("<vcpu ", HUGE))
    assert ("huge-pages-short" in named(findings_of(document, host=host))) is short
    assert 4 * GIB == 2048 * 2 * MIB


def test_pools_that_are_not_known_can_hold_no_more_than_the_host() -> None:
    nodes = tuple(replace(node, page_pools=()) for node in small_host().nodes)
    host = replace(small_host(), nodes=nodes)
    for gib, found in ((4, {}), (400, {"memory-short": Severity.CRITICAL})):
        document = changed(NO_DEVICES, ("<vcpu ", HUGE), (">4</memory>", f">{gib}</memory>"))
        assert named(findings_of(document, host=host)) == found


def test_a_host_with_a_node_of_unknown_memory_may_have_enough() -> None:
    first, second = small_host().nodes
    host = replace(small_host(), nodes=(first, replace(second, memory_bytes=None)))
    tune = "<numatune><memory mode='preferred' nodeset='0'/></numatune><vcpu "
    document = changed(NO_DEVICES, ("<vcpu ", tune), (">4</memory>", ">400</memory>"))
    assert named(findings_of(document, host=host)) == {"memory-short": Severity.WARNING}


SLOT_32 = "<interface type='user'><address type='pci' bus='0' slot='32'/></interface>"
GAP = "<cell id='0' cpus='0-1' memory='2'/><cell id='2' cpus='2-3' memory='2'/>"


def schema_findings(xml: bytes) -> list[Finding]:
    if shutil.which("virsh") is None:
        pytest.skip("no virsh here")
    document = open_domain(xml, "vm.xml")
    errors = [SchemaError(1, "Element domain failed to validate content")]
    parsed = parse_with_libvirt(document)
    answer = verify_document(document, schema_errors=errors, parse_result=parsed)
    return [one for one in answer.findings if one.id == "schema"]


@pytest.mark.libvirt
def test_what_libvirts_parser_takes_whole_is_no_fault_of_the_document() -> None:
    (found,) = schema_findings(kubevirt_document(["0000:18:00.0"]).encode())
    assert found.severity is Severity.INFO


@pytest.mark.libvirt
@pytest.mark.parametrize("mib", [64, 128])
def test_memory_of_cells_without_that_of_a_dimm_is_taken(mib: int) -> None:
    """libvirt counts <memory> anew where there are cells."""
    (found,) = schema_findings(
        f"""<domain type='qemu'><name>d</name><maxMemory slots='1' unit='MiB'>512</maxMemory>
        <memory unit='MiB'>64</memory><vcpu>1</vcpu><os><type machine='q35'>hvm</type></os>
        <cpu><numa><cell id='0' cpus='0' memory='64' unit='MiB'/></numa></cpu><devices>
        <memory model='dimm'><target><size unit='MiB'>{mib}</size><node>0</node></target></memory>
        </devices></domain>""".encode()
    )
    assert found.severity is Severity.INFO, found.observed


@pytest.mark.libvirt
def test_a_redirected_usb_device_has_the_controller_that_qemus_driver_adds() -> None:
    document = changed(PLAIN, ("</devices>", "<redirdev bus='usb' type='spicevmc'/></devices>"))
    parsed = parse_with_libvirt(open_domain(document, "vm.xml"))
    assert parsed is not None
    assert parsed.refusal is None


@pytest.mark.libvirt
@pytest.mark.parametrize(
    ("was", "is_now"),
    [
        (">4</vcpu>", ">x</vcpu>"),
        ("</devices>", "<controller type='pci' index='x' model='pcie-root'/></devices>"),
        ("</devices>", f"{SLOT_32}</devices>"),
        ("<cpu mode='host-passthrough'/>", f"<cpu><numa>{GAP}</numa></cpu>"),
        ("<name>", "<uuid>x</uuid><name>"),
    ],
)
def test_what_nobody_can_read_is_a_finding(tmp_path: Path, was: str, is_now: str) -> None:
    if shutil.which("virsh") is None:
        pytest.skip("no virsh here")
    path = tmp_path / "vm.xml"
    path.write_bytes(changed(NO_DEVICES, (was, is_now)))
    found = verify(VerifyRequest(document=path, host="hgx-h100")).findings
    assert [one.severity for one in found.findings if one.id == "schema"] == [Severity.CRITICAL]


@pytest.mark.libvirt
def test_what_libvirt_would_drop_in_silence_is_named() -> None:
    typo = "<cputune><vcpupinn vcpu='0' cpuset='0'/></cputune><vcpu "
    found = schema_findings(changed(PLAIN, ("<vcpu ", typo)))
    assert {one.severity for one in found} == {Severity.CRITICAL}
    assert "<vcpupinn> in <cputune>" in {one.subject for one in found}


@pytest.mark.libvirt
def test_what_libvirt_refuses_is_said_in_its_words() -> None:
    (found,) = schema_findings(changed(PLAIN, ("<devices>", "<clock offset='x'/><devices>")))
    assert found.severity is Severity.CRITICAL and "offset" in found.observed
