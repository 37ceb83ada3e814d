"""A host as mappings: folders, links, loops."""

from homenode.machine.snapshot.memory import MemorySnapshot
from homenode.machine.snapshot.protocol import Snapshot


def _host(files: dict[str, str], links: dict[str, str]) -> Snapshot:
    return MemorySnapshot("test", files, links)


def test_folders_are_implied_and_listed_sorted() -> None:
    host = _host({"/sys/b/x": "1", "/sys/a/y": "2"}, {"/sys/c": "a"})
    assert host.list("/sys") == ("a", "b", "c")
    assert host.list("/") == ("sys",)
    assert host.list("/sys/c") == ("y",)
    assert host.list("/sys/b/x") is None


def test_empty_folders_are_there() -> None:
    host = MemorySnapshot("test", {}, folders=("/sys/devices/empty", "/sys/devices/empty/deeper"))
    assert host.list("/sys/devices") == ("empty",)
    assert host.list("/sys/devices/empty/deeper") == ()


def test_links_in_the_middle_of_a_path_are_followed() -> None:
    host = _host(
        {"/sys/devices/pci0000:00/0000:00:01.0/class": "0x060400"},
        {
            "/sys/bus/pci/devices/0000:00:01.0": "../../../devices/pci0000:00/0000:00:01.0",
            "/sys/class/all": "/sys/bus/pci",
        },
    )
    path = "/sys/class/all/devices/0000:00:01.0"
    assert host.read_text(f"{path}/class") == "0x060400"
    assert host.real_path(path) == "/sys/devices/pci0000:00/0000:00:01.0"
    assert host.read_link("/sys/class/all/devices/0000:00:01.0") is not None
    assert host.read_link(f"{path}/class") is None


def test_a_link_to_nothing_can_be_read_as_a_link_only() -> None:
    host = _host({}, {"/sys/devices/x/driver": "../../bus/pci/drivers/vfio-pci"})
    assert host.read_link("/sys/devices/x/driver") == "../../bus/pci/drivers/vfio-pci"
    assert host.real_path("/sys/devices/x/driver") is None
    assert host.read_text("/sys/devices/x/driver") is None


def test_a_link_cannot_leave_the_top() -> None:
    host = _host({"/etc/shadow": "inside"}, {"/sys/out": "../../../../etc/shadow"})
    assert host.read_text("/sys/out") == "inside"
    assert host.real_path("/sys/out") == "/etc/shadow"


def test_link_loops_end() -> None:
    host = _host({}, {"/a": "/b", "/b": "/a", "/c": "c/c", "/d": "d"})
    for path in ("/a", "/b", "/c/x", "/d", "/d/d/d"):
        assert host.real_path(path) is None
        assert host.read_text(path) is None


def test_links_that_double_at_each_step_cost_nothing() -> None:
    links = {f"/l{i}": f"/l{i + 1}/../l{i + 1}" for i in range(39)}
    # 2^39 steps if each link were followed again: this test would then not end.
    assert _host({"/l39/x": ""}, links).real_path("/l0/x") is None


def test_a_hundred_thousand_paths_are_listed() -> None:
    files = {f"/sys/devices/system/node/node{i % 8}/memory{i}/state": "" for i in range(100_000)}
    names = _host(files, {}).list("/sys/devices/system/node/node3")
    assert names is not None and len(names) == 12_500


def test_bytes_that_are_no_text_survive() -> None:
    config = bytes(range(256))
    host = _host({"/config": config.decode("utf-8", "surrogateescape")}, {})
    text = host.read_text("/config")
    assert text is not None and text.encode("utf-8", "surrogateescape") == config
