"""Whether libvirt holds what it was given: what it adds is no change, what it drops is named."""

import pytest

from homenode.change.apply.define_step import list_dropped_fields

DEVICE = (
    "<hostdev mode='subsystem' type='pci' managed='yes'><source>"
    "<address domain='0x0000' bus='0x19' slot='0x00' function='0x0'/></source>{address}</hostdev>"
)
ADDRESS = "<address type='pci' domain='0x0000' bus='0x03' slot='0x00' function='0x0'/>"
DIMM = (
    "<memory model='dimm'><target><size unit='MiB'>512</size><node>1</node></target>{alias}"
    "</memory>"
)
GIVEN = f"""<domain type='kvm'>
  <name>vm</name>
  <maxMemory slots='2' unit='GiB'>4</maxMemory>
  <memory unit='MiB'>1536</memory>
  <vcpu>2</vcpu>
  <numatune><memory mode='strict' nodeset='0-1'/></numatune>
  <os><type arch='x86_64' machine='q35'>hvm</type></os>
  <cpu><numa><cell id='0' cpus='0' memory='512' unit='MiB'/>
    <cell id='1' cpus='1' memory='512' unit='MiB'/></numa></cpu>
  <devices>{DEVICE.format(address=ADDRESS)}{DIMM.format(alias="")}</devices>
</domain>
"""


def lost(*changes: tuple[str, str]) -> tuple[str, ...]:
    owned = GIVEN
    for before, after in changes:
        assert before in owned
        owned = owned.replace(before, after)
    return list_dropped_fields(GIVEN.encode(), owned.encode())


def test_what_libvirt_adds_of_its_own_is_no_change() -> None:
    assert lost(("</target></memory>", "</target><alias name='dimm0'/></memory>")) == ()
    bare = GIVEN.replace(ADDRESS, "")
    assert list_dropped_fields(bare.encode(), GIVEN.encode()) == ()


@pytest.mark.parametrize(
    ("before", "after", "said"),
    [
        (
            "<node>1</node>",
            "<node>0</node>",
            "memory device 0: 512 MiB in cell 1 on nodes 0-1 became 512 MiB in cell 0 on nodes 0-1",
        ),
        (DIMM.format(alias=""), "", "memory devices: "),
        (
            "bus='0x03'",
            "bus='0x04'",
            "0000:19:00.0: guest address 0000:03:00.0 became guest address 0000:04:00.0",
        ),
        (
            DEVICE.format(address=ADDRESS),
            "",
            "0000:19:00.0: passed through became not passed through",
        ),
        (
            "mode='strict'",
            "mode='preferred'",
            "<numatune><memory>: strict on nodes 0-1 became preferred",
        ),
        (
            "cpus='1' memory='512'",
            "cpus='1' memory='256'",
            "memory of cell 1: 512 MiB became 256 MiB",
        ),
    ],
)
def test_what_it_drops_or_moves_is_named(before: str, after: str, said: str) -> None:
    assert any(line.startswith(said) for line in lost((before, after))), lost((before, after))
