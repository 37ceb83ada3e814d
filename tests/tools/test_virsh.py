"""Outputs of virsh capabilities, virsh version and qemu --version."""

import pytest

from homenode.cpuset import CpuSet
from homenode.errors import InputError, ParseError
from homenode.machine.tools import virsh_capabilities
from homenode.machine.tools.versions import parse_qemu_version, parse_virsh_version
from tests.mutations import survives
from tests.shared_data import needs_shared, shared

CAPABILITIES = """<capabilities>
  <host><uuid>00000000-0000-0000-0000-000000000000</uuid>
    <cpu><arch>x86_64</arch><model>EPYC-Genoa</model></cpu>
    <iommu support='no'/>
    <topology><cells num='2'>
      <cell id='0'><memory unit='KiB'>1024</memory>
        <pages unit='KiB' size='4'>256</pages><pages unit='KiB' size='1048576'>2</pages>
        <distances><sibling id='0' value='10'/><sibling id='8' value='40'/></distances>
        <cpus num='2'><cpu id='0' socket_id='0' die_id='0' core_id='0' siblings='0,128'/>
          <cpu id='5'/></cpus></cell>
      <cell id='8'><memory unit='KiB'>97871</memory><cpus num='0'/></cell>
    </cells></topology>
    <cache><bank id='0' level='3' type='both' size='32' unit='MiB' cpus='0-7,128-135'/></cache>
  </host>
  <guest><os_type>hvm</os_type></guest>
</capabilities>
"""
VIRSH = """Compiled against library: libvirt 9.0.0
Using library: libvirt 9.0.0
Using API: QEMU 9.0.0
Running hypervisor: QEMU 7.2.22
Running against daemon: 10.1.0

"""


def test_cells_have_distances_and_cpus() -> None:
    first, second = virsh_capabilities.parse(CAPABILITIES)
    assert (first.node, first.distances) == (0, ((0, 10), (8, 40)))
    assert first.siblings_of_pu == {0: CpuSet([0, 128]), 5: None}  # 5 is offline
    assert (second.node, second.siblings_of_pu) == (8, {})


@needs_shared
def test_published_capabilities_are_read() -> None:
    path = shared("machines/libvirt-caps/virt-manager-kvm-x86_64-caps.xml")
    (cell,) = virsh_capabilities.parse(path.read_text())
    assert len(cell.siblings_of_pu) == 8
    assert set(map(str, cell.siblings_of_pu.values())) == {"0,4", "1,5", "2,6", "3,7"}


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ("<host>", "<hosts>", "well-formed"),
        ("id='8'><", "id='0'><", "each cell once"),
        ("id='5'", "id='five'", r"a number below 2\^60 for cpu id"),
        ("id='5'", "id='70000'", "CPUs up to"),
        ("siblings='0,128'", "siblings='x'", "a list"),
        ("capabilities>", "domain>", "expected <capabilities>"),
    ],
)
def test_capabilities_that_are_none_are_refused(old: str, new: str, says: str) -> None:
    with pytest.raises(InputError, match=says):
        virsh_capabilities.parse(CAPABILITIES.replace(old, new))


def test_versions_are_numbers() -> None:
    assert parse_virsh_version(VIRSH) == ((10, 1, 0), (7, 2, 22))
    assert parse_virsh_version("Using library: libvirt 11.3.0\n") == ((11, 3, 0), None)


@pytest.mark.parametrize(
    ("text", "version"),
    [
        ("QEMU emulator version 7.2.22 (Debian 1:7.2+dfsg-7+deb12u18)\nCopyright", (7, 2, 22)),
        ("QEMU emulator version 9.1.0 (qemu-kvm-9.1.0-15.el9)\n", (9, 1, 0)),
        ("QEMU emulator version 10.0\n", (10, 0, 0)),
        ("QEMU emulator version 8.2.50 (v8.2.0-1-gabc)", (8, 2, 50)),
    ],
)
def test_a_qemu_is_read_with_what_its_packager_adds(
    text: str, version: tuple[int, int, int]
) -> None:
    assert parse_qemu_version(text) == version


@pytest.mark.parametrize("text", ["", "error: failed to connect", "Using API: QEMU 9.0.0\n"])
def test_versions_that_are_none_are_refused(text: str) -> None:
    with pytest.raises(ParseError):
        parse_virsh_version(text)
    with pytest.raises(ParseError):
        parse_qemu_version(text)


@pytest.mark.parametrize(
    ("parser", "text"),
    [
        (virsh_capabilities.parse, CAPABILITIES),
        (parse_virsh_version, VIRSH),
        (parse_qemu_version, "QEMU emulator version 7.2.22 (Debian)\nCopyright\n"),
    ],
    ids=["capabilities", "virsh version", "qemu version"],
)
def test_damaged_output_is_read_or_refused_and_nothing_else(parser: object, text: str) -> None:
    assert callable(parser)
    survives(parser, text, 600)
