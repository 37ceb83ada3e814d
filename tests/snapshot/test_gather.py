"""The contents table: what it names is what discovery reads, and nothing else gets through."""

import re

import pytest
from msgspec import structs

from homenode.machine.discover.host import discover
from homenode.machine.snapshot.contents import (
    COMMAND_OF_NAME,
    COMMANDS,
    IDENTITY_PATHS,
    PATHS,
    PathKind,
    TextForm,
)
from homenode.machine.snapshot.gather import expand_glob, gather, keep_port_type
from homenode.machine.snapshot.protocol import MemorySnapshot, Snapshot
from homenode.machine.snapshot.redact import read_identities, redact
from homenode.machine.snapshot.store import open_snapshot
from tests.shared_data import SHARED

TREES = SHARED / "machines" / "sysfs"
NAMES = """
    20em64t-hybrid-1p6c2t+2ca4co1t 40intel64-2g2n4c+pcilocality 64amd64-4s2n4ca2co
    fakememinitiators-1np2c+1npp+gi nvidia-dgx-gb10 nvidiagpunumanodes offline-cpu0-node0
""".split()
ZERO, DRIVERS = "0x0000000000000000", "../../../bus/pci/drivers"
CGROUP = "CPUs disallowed by a cgroup"
"""Trees without /proc/self/status name cgroups by their users' names: a capture leaves them out."""


def _tree(name: str) -> Snapshot:
    if not TREES.is_dir():
        pytest.skip(f"{TREES} is not there")
    return open_snapshot(TREES / f"{name}.tar.bz2")


@pytest.mark.parametrize("name", NAMES)
def test_a_captured_host_is_discovered_as_the_host_itself(name: str) -> None:
    tree = _tree(name)
    gathered = gather(tree)
    assert not gathered.unlike
    host, again = discover(tree), discover(gathered.snapshot)
    for field in structs.fields(host):
        before, after = getattr(host, field.name), getattr(again, field.name)
        if field.name == "gaps":
            before = tuple(gap for gap in before if gap.subject != CGROUP)
            after = tuple(gap for gap in after if gap.subject != CGROUP)
        assert after == before, field.name


@pytest.mark.parametrize("name", NAMES)
def test_redaction_changes_nothing_of_the_topology(name: str) -> None:
    tree = _tree(name)
    gathered = gather(tree).snapshot
    host = discover(gathered)
    redacted = discover(redact(gathered, read_identities(tree)).snapshot)
    assert structs.replace(
        redacted, name=host.name, settings=host.settings, gaps=host.gaps
    ) == structs.replace(host)


def test_what_is_in_the_table_can_be_matched_by_a_shell() -> None:
    for rule in PATHS:
        assert re.fullmatch(r"/[A-Za-z0-9_./*\[\]-]+", rule.glob), rule.glob
        assert rule.purpose
        # A file's last part is one name or a number: the collector gives paths from lines by it.
        last = rule.glob.rpartition("/")[2]
        if rule.kind is PathKind.FILE:
            assert "*" not in last or last in ("[0-9]*", "[a-z]*")
    globs = [rule.glob for rule in PATHS]
    assert len(set(globs)) == len(globs)
    for position, rule in enumerate(PATHS):
        assert rule.unless is None or rule.unless in globs[:position]


def test_no_command_can_change_a_host() -> None:
    for command in COMMANDS:
        for argv in (*command.spellings, *([command.list_argv] if command.list_argv else [])):
            if argv[0] == "virsh":
                assert "-r" in argv
    assert len(COMMAND_OF_NAME) == len(COMMANDS)
    assert all(re.fullmatch(r"[a-z-]+", command.name) for command in COMMANDS)


def test_identities_are_never_gathered() -> None:
    files = dict.fromkeys(IDENTITY_PATHS, "gpu7\n")
    assert not gather(MemorySnapshot("h", files)).snapshot.files


@pytest.mark.parametrize(
    ("form", "good", "bad"),
    [
        (TextForm.LIST, ["", "0", "0-3,8", " (null)\n"], ["0-", "a", "0 1", "1-2-3", "0," * 50]),
        (TextForm.NUMBER, ["-1", "42\n"], ["1.5", "0x1"]),
        (TextForm.HEX, ["0x030200", "10de"], ["0x", "xyz", "123456789"]),
        (TextForm.MASK, ["ff", "00000000,ffffffff"], ["fffffffff", "f,", "FF"]),
        (TextForm.NUMBERS, ["10 21", "10"], ["10,21", "10 x"]),
        (TextForm.WORD, ["on", "Unified", "amd-pstate-epp", "4"], ["a b", "1" * 5]),
        (TextForm.CHOICE, ["always [madvise] never"], ["always", "a b c d e f g h i"]),
        (TextForm.SIZE, ["32768K", "1024"], ["32 KiB", "K"]),
        (TextForm.SPEED, ["32.0 GT/s PCIe", "Unknown", "8 GT/s"], ["fast", "32.0"]),
        (TextForm.RESOURCE, [f"{ZERO} {ZERO} {ZERO}\n"], ["0x0"]),
        (TextForm.NODE_MEMINFO, ["\nNode 0 MemTotal:  1 kB\nNode 0 Active(file): 2\n"], ["M: 1"]),
        (TextForm.FIELDS, ["model name\t: A: B\n\nflags\t\t: fpu"], ["no colon", "\x1b: x"]),
        (TextForm.TO_DRIVER, [f"{DRIVERS}/vfio-pci"], ["/etc", "../x", "../../bus/pci"]),
        (TextForm.TO_GROUP, ["../../../kernel/iommu_groups/17"], ["../../kernel/iommu_groups/a"]),
        (
            TextForm.TO_DEVICE,
            ["../../../devices/pci0000:17/0000:17:01.0/0000:18:00.0", "../0000:18:00.0"],
            ["../../../devices/pci0000:17", "/sys/devices/pci0000:17/0000:17:01.0", "../gpu7"],
        ),
    ],
)
def test_a_text_has_its_form_or_has_not(form: TextForm, good: list[str], bad: list[str]) -> None:
    for text in good:
        assert form.matches(text), text
    for text in bad:
        assert not form.matches(text), text


@pytest.mark.parametrize("form", list(TextForm))
def test_no_form_takes_long_to_say_no(form: TextForm) -> None:
    for text in ("a:" * 20_000 + "\x1b", "0-" * 20_000, "f" * 40_000 + "!", " " * 40_000 + "x\x1b"):
        form.matches(text)


def test_the_better_of_two_spellings_is_used() -> None:
    files = {
        "/sys/devices/system/node/node0/cpulist": "0-3\n",
        "/sys/devices/system/node/node0/cpumap": "f\n",
    }
    gathered = gather(MemorySnapshot("new", files)).snapshot
    assert list(gathered.files) == ["/sys/devices/system/node/node0/cpulist"]
    del files["/sys/devices/system/node/node0/cpulist"]
    assert len(gather(MemorySnapshot("old", files)).snapshot.files) == 1


def test_control_characters_and_odd_names_stay_behind() -> None:
    host = MemorySnapshot(
        "h",
        {
            "/sys/devices/virtual/dmi/id/product_name": "Server\x1b]0;pwned\x07\n",
            "/sys/devices/system/cpu/cpu0; rm -rf/online": "1\n",
            "/proc/device-tree/model": "Some Board\0",
        },
    )
    gathered = gather(host)
    assert gathered.unlike == ("/sys/devices/virtual/dmi/id/product_name",)
    assert dict(gathered.snapshot.files) == {"/proc/device-tree/model": "Some Board\n"}


def test_globs_go_one_directory_at_a_time() -> None:
    host = MemorySnapshot("h", {"/sys/a1/b/x": "", "/sys/a2/b/x": "", "/sys/c/b/x": ""})
    assert list(expand_glob(host, "/sys/a[0-9]*/b/x")) == ["/sys/a1/b/x", "/sys/a2/b/x"]
    assert list(expand_glob(host, "/sys/*/b")) == ["/sys/a1/b", "/sys/a2/b", "/sys/c/b"]
    assert list(expand_glob(host, "/none/*/b")) == []


def test_configuration_space_keeps_the_port_type_and_no_more() -> None:
    config = bytearray(b"\xaa" * 256)
    config[0x34] = 0x40
    config[0x40:0x42] = bytes([0x01, 0x80])
    config[0x80:0x84] = bytes([0x10, 0x40, 0x42, 0x01])  # and back: a loop
    kept = keep_port_type(bytes(config))
    assert kept is not None and len(kept) == 256
    assert kept[0x82:0x84] == b"\x42\x01"
    assert kept[0x42:0x80] == bytes(0x3E) and kept[0xC0:] == bytes(0x40)
    assert keep_port_type(bytes(63)) is None
    assert keep_port_type(bytes(4096)) == bytes(256)
