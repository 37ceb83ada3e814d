"""host.toml: what it means, and what is said about one that is wrong."""

import re
import tomllib
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from homenode.bdf import Bdf
from homenode.cpuset import CpuSet
from homenode.errors import InputError
from homenode.machine.description.parse import parse_description
from homenode.machine.discover.host import discover
from homenode.machine.pci import DeviceKind, PciLink, PortType
from homenode.machine.topology import CoreKind, Host, MemoryKind
from tests.cpu_time import cpu_time_below
from tests.rendered.machine import render

HOSTS = Path(__file__).parents[2] / "src" / "homenode" / "machine" / "hosts"

TWO = """
name = "two"
packages = 2
cores_per_package = 2
threads_per_core = 2
memory_per_node = "8GiB"
"""
HYBRID = """core_groups = [{ kind = "performance", cores = 2, threads_per_core = 2 },
 { kind = "efficiency", cores = 2 }]"""


def host_of(text: str) -> Host:
    return parse_description(text, "host.toml").host


def refusal(text: str) -> str:
    with pytest.raises(InputError) as error:
        host_of(text)
    assert str(error.value).startswith("host.toml: ")
    assert error.value.exit_code == 2
    return str(error.value)


def pus_of_cores(text: str) -> dict[tuple[int, int], str]:
    return {core.id: str(core.pus) for core in host_of(text).cores}


def test_a_two_package_eight_gpu_host_fits_in_25_lines() -> None:
    text = TWO + '[[root]]\nnode = [0, 0, 1, 1]\nports = [{ switch = ["gpu", "gpu", "nic"] }]\n'
    assert len(text.splitlines()) <= 25
    host = host_of(text)
    gpus = host.devices_of_kind(DeviceKind.GPU)
    assert [gpu.node for gpu in gpus] == [0, 0, 0, 0, 1, 1, 1, 1]
    assert len({host.switch_above(gpu.bdf) for gpu in gpus}) == 4


@pytest.mark.parametrize(
    ("numbering", "cores"),
    [
        ("siblings-far", ["0,4", "1,5", "2,6", "3,7"]),
        ("siblings-adjacent", ["0-1", "2-3", "4-5", "6-7"]),
        ("siblings-far-in-package", ["0,2", "1,3", "4,6", "5,7"]),
        ("nodes-interleaved", ["0,4", "2,6", "1,5", "3,7"]),
    ],
)
def test_pus_are_numbered_as_the_document_shows(numbering: str, cores: list[str]) -> None:
    found = pus_of_cores(TWO + f'numbering = "{numbering}"')
    assert [found[key] for key in ((0, 0), (0, 1), (1, 0), (1, 1))] == cores


def test_smt_may_be_off_in_one_package() -> None:
    host = host_of(TWO + "[[package]]\nindex = 1\nthreads_per_core = 1")
    assert [str(core.pus) for core in host.cores] == ["0,4", "1,5", "2", "3"]
    assert [str(package.pus) for package in host.packages] == ["0-1,4-5", "2-3"]


def test_hybrid_cores_have_kinds() -> None:
    text = f'name = "hybrid"\nmemory_per_node = "1GiB"\nnumbering = "siblings-adjacent"\n{HYBRID}'
    host = host_of(text)
    assert [(core.kind, str(core.pus)) for core in host.cores] == [
        (CoreKind.PERFORMANCE, "0-1"),
        (CoreKind.PERFORMANCE, "2-3"),
        (CoreKind.EFFICIENCY, "4"),
        (CoreKind.EFFICIENCY, "5"),
    ]
    wide = host_of(f"{text}\n[[package]]\nindex = 0\nthreads_per_core = 4")
    assert [len(core.pus) for core in wide.cores] == [2, 2, 4, 4]


def test_a_node_may_span_packages_and_a_cache_may_span_nodes() -> None:
    spanning = host_of(TWO + "packages_per_node = 2")
    assert [(str(node.pus), node.package) for node in spanning.nodes] == [("0-7", None)]
    split = host_of(TWO + "nodes_per_package = 2")
    assert [str(node.pus) for node in split.nodes] == ["0,4", "1,5", "2,6", "3,7"]
    assert [str(llc.pus) for llc in split.llcs] == ["0-1,4-5", "2-3,6-7"]
    assert split.distances == (
        (10, 12, 21, 21),
        (12, 10, 21, 21),
        (21, 21, 10, 12),
        (21, 21, 12, 10),
    )


def test_nodes_may_share_cores_unevenly_and_the_others_take_the_rest() -> None:
    text = (
        'name = "uneven"\nnodes_per_package = 3\ncores_per_package = 8\nmemory_per_node = "1GiB"\n'
        "[[node]]\nindex = 1\ncores = 4\n"
    )
    assert [len(node.pus) for node in host_of(text).nodes] == [2, 4, 2]
    assert "expected 8 cores of the package over nodes 0, 1, 2" in refusal(
        text.replace("cores = 4", "cores = 5")
    )


def test_a_node_without_cores_has_its_memory_its_gpu_and_its_distances() -> None:
    host = host_of(
        TWO
        + """
        distances = { memory_same_package = 80, memory_other_package = 120, between_memory = 255 }
        [[node]]
        index = 4
        package = 1
        gpu = "gpu.0"
        memory = "96GiB"
        [[node]]
        index = "5-6"
        kind = "other"
        memory = "1GiB"
        [[root]]
        node = 1
        ports = ["gpu"]
        """
    )
    assert host.distances is not None
    assert host.distances[0] == (10, 21, 120, 120, 120)
    assert host.distances[1] == (21, 10, 80, 120, 120)
    assert host.distances[2] == (120, 80, 10, 255, 255)
    assert [node.memory_kind for node in host.nodes[2:]] == [
        MemoryKind.GPU,
        MemoryKind.OTHER,
        MemoryKind.OTHER,
    ]
    assert host.nodes[2].gpu == Bdf.parse("01:00.0")


def test_offline_pus_are_in_no_core_node_or_cache() -> None:
    host = host_of(TWO + 'offline_pus = "1,5,6"')
    assert [str(core.pus) for core in host.cores] == ["0,4", "2", "3,7"]
    assert [str(node.pus) for node in host.nodes] == ["0,4", "2-3,7"]
    lost = host.pus[5]
    assert (lost.core, lost.node, lost.llc, lost.package) == (None, None, None, None)
    assert not host.pus[5].online


def test_huge_pages_are_taken_from_the_free_memory() -> None:
    host = host_of(TWO + 'hugepages_per_node = { "1GiB" = 2, "2MiB" = { total = 4, free = 1 } }')
    node = host.nodes[0]
    assert [(p.page_bytes, p.total_pages, p.free_pages) for p in node.page_pools] == [
        (2 << 20, 4, 1),
        (1 << 30, 2, 2),
    ]
    assert node.memory_free_bytes == (6 << 30) - (8 << 20)


def test_buses_are_numbered_depth_first_and_a_given_address_is_honoured() -> None:
    host = host_of(
        TWO
        + '[[root]]\nnode = 0\nbus = 0x15\nports = [{ switch = ["nvme", "gpu@1b:00.0"] }, "nic"]\n'
        + '[[root]]\nnode = 1\nports = ["gpu"]\n'
    )
    assert [(str(device.bdf), device.kind) for device in host.pci_devices] == [
        ("0000:15:01.0", DeviceKind.BRIDGE),
        ("0000:15:02.0", DeviceKind.BRIDGE),
        ("0000:16:00.0", DeviceKind.BRIDGE),
        ("0000:17:00.0", DeviceKind.BRIDGE),
        ("0000:17:01.0", DeviceKind.BRIDGE),
        ("0000:18:00.0", DeviceKind.NVME),
        ("0000:1b:00.0", DeviceKind.GPU),
        ("0000:1c:00.0", DeviceKind.NIC),
        ("0000:1d:01.0", DeviceKind.BRIDGE),
        ("0000:1e:00.0", DeviceKind.GPU),
    ]
    bridges = [device.bridge for device in host.pci_devices if device.bridge]
    assert [(b.port_type, b.secondary_bus, b.subordinate_bus) for b in bridges[:4]] == [
        (PortType.ROOT_PORT, 0x16, 0x1B),
        (PortType.ROOT_PORT, 0x1C, 0x1C),
        (PortType.SWITCH_UPSTREAM, 0x17, 0x1B),
        (PortType.SWITCH_DOWNSTREAM, 0x18, 0x18),
    ]


def test_a_link_is_up_at_what_both_ends_can_do_unless_it_is_said_to_be_worse() -> None:
    text = TWO + '[model.g]\nclass = "gpu"\nlink = "32GT/s x16"\n[[root]]\nports = ["g"]\n'

    def links(extra: str) -> list[PciLink | None]:
        return [device.link for device in host_of(text + extra).pci_devices]

    full = PciLink(32.0, 16, 32.0, 16)
    assert links("") == [full, full]
    slow_port = 'port_link = "16GT/s x8"'
    assert links(slow_port) == [PciLink(16.0, 8, 16.0, 8), PciLink(16.0, 8, 32.0, 16)]
    switch = '[{ switch = ["g"], link = "32GT/s x16", trained = "8GT/s x16" }]'
    assert host_of(text.replace('["g"]', switch)).pci_devices[0].link == PciLink(8.0, 16, 32.0, 16)
    sick = text.replace('link = "32GT/s x16"', 'link = "32GT/s x16"\ntrained = "5GT/s x16"')
    assert [device.link for device in host_of(sick).pci_devices] == [PciLink(5.0, 16, 32.0, 16)] * 2


def test_virtual_functions_follow_their_physical_function() -> None:
    host = host_of(
        TWO + '[model.n]\nclass = "nic"\ntotal_vfs = 9\nvfs = 9\nvf_device = 0x101e\n'
        '[[root]]\nnode = 0\nports = ["n"]\n'
    )
    functions = [device for device in host.pci_devices if device.physical_function]
    assert str(functions[0].bdf) == "0000:01:00.1"
    assert str(functions[8].bdf) == "0000:01:01.1"
    assert len({device.iommu_group for device in functions}) == 9


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("nodes_per_packge = 2", "nodes_per_packge: unknown key"),
        ("nodes_per_packge = 2", "did you mean nodes_per_package?"),
        ("packages_per_node = 3", "expected a whole number, 1 to 2, found 3"),
        ("llcs_per_package = 3", "llcs_per_package: expected a whole number, 0 to 2, found 3"),
        ("numbering = 'random'", "numbering: Invalid enum value 'random'"),
        ("format = 2", "expected a host.toml up to version 1, found 2"),
        ("node_numbers = [1, 0]", "node_numbers: expected 2 ascending numbers, found [1, 0]"),
        ("offline_pus = '8'", "expected some of the CPUs 0-7, not all, found '8'"),
        ("offline_pus = '0-7'", "not all, found '0-7'"),
        ("offline_pus = 'x'", "offline_pus: expected a list"),
        ("distances = [[10, 20]]", "distances: expected 2 rows, one per node, found 1"),
        ("distances = [[10, 20], [20, 11]]", "expected 10 from node to itself, found 11"),
        ("distances = { same_package = 10 }", "same_package: expected int >= 11, found 10"),
        ("hugepages_per_node = { '1GiB' = 9 }", "expected huge pages within 8589934592 bytes"),
        ("hugepages_per_node = { '3MiB' = 1 }", "a power of two"),
        ("[[node]]\nindex = 2\nhugepages = { '2MiB' = 1 }", "huge pages within 0 bytes"),
        ("packages_per_node = 2\n[[node]]\nindex = 0\ncores = 1", "a node that spans packages"),
        (f"[[package]]\nindex = 1\ncores = 2\n{HYBRID}", "package[0].core_groups: expected no"),
        ("hugepages_per_node = { '2MiB' = 1, '2048KiB' = 1 }", "expected each page size once"),
        ("[expect]\npus = 9", "expect.pus: expected 8, found 9"),
        ("[settings]\nqemu = '8.2'", "settings.qemu: expected a version such as"),
        ("[settings]\nisolated = '9'", "settings.isolated: expected some of the online CPUs 0-7"),
        ("[[node]]\nindex = 0\ngpu = 'a'", "a node without cores"),
        ("[[node]]\nindex = 7\ngpu = 'a'", "node 7.gpu: expected the name of a device"),
        ("[[node]]\nindex = '5000'", "node numbers below 1024"),
        ("[[node]]\nmemory = '1GiB'", "node[0]: Object missing required field `index`"),
        ("[[node]]\nindex = 3\nmemory = 64", "expected a size with its unit"),
        ("[[package]]\nindex = 2", "package[0].index: expected a whole number, 0 to 1, found 2"),
        ("[[root]]\nnode = 2\nports = ['gpu']", "root[0].node: expected one of the nodes 0, 1"),
        ("[[root]]\nnode = 0", "root[0].ports: expected 1 to 31 devices on its bus, found 0"),
        ("[[root]]\nports = ['gpux']", "did you mean gpu?"),
        ("[[root]]\nbus = 3\nports = ['gpu@03:00.0']", "expected device 0 of a bus from 0000:04"),
        ("[[root]]\nbus = [0, 1]\nports = ['gpu']", "expected 1 number, one per node"),
        (
            "[[root]]\nbus = 2\nports = ['gpu']\n[[root]]\nbus = 3\nports = ['gpu']",
            "root[1].bus: expected buses free of the other root complexes, found 0x03-0x04",
        ),
        ("[[root]]\nbus = 255\nports = ['gpu']", "expected buses up to 0xff, found 0x100"),
        (
            "[[root]]\nports = [{ switch = ['gpu'], vfs = 1 }]",
            "vfs: expected no such key on a switch",
        ),
        ("[[root]]\nports = ['gpu']\nintegrated = ['empty']", "no such key on a device here"),
        ("[model.g]\nvendor = 1", "model.g.class: expected one of gpu, nic"),
        ("[model.g]\nclass = 'gpu'\nlink = '33GT/s x16'", "expected a link such as 32GT/s x16"),
        ("[model.g]\nclass = 'gpu'\nbars = ['3MiB']", "expected a power of two"),
        ("[model.g]\nclass = 'gpu'\nfunctions = ['x']", "model.g.functions: expected models"),
        ("[[link]]\nbetween = 'gpu'\ncount = 2", "link[0].between: expected a model or names"),
        (
            "[[root]]\nports = [{ model = 'gpu', driver = 'vfio-pci' }]\n"
            "[[link]]\nbetween = 'gpu'\ncount = 2",
            "expected GPUs that the driver nvidia has",
        ),
        ("[facts]\nassumed = 'all'", "facts.assumed: expected array, found 'all'"),
        ("cpu = { nam = 'x' }", "cpu.nam: unknown key"),
        ("[expect]\ncoers = 3", "did you mean cores?"),
    ],
)
def test_what_is_wrong_is_named_with_its_key(change: str, words: str) -> None:
    assert words in refusal(TWO + change)


def test_a_file_that_is_no_toml_or_lacks_what_is_needed_is_refused() -> None:
    assert "expected TOML" in refusal("name = ")
    assert "expected a name of letters" in refusal("cores_per_package = 1")
    assert "cores_per_package" in refusal("name = 'a'\nmemory_per_node = '1GiB'")
    assert "memory_per_node: expected the memory" in refusal("name = 'a'\ncores_per_package = 1")
    assert "characters" in refusal("#" * (1 << 21))


@pytest.mark.parametrize(
    "text",
    [
        "a." * 20_000 + "a = 1\n",
        f"[{'a.' * 20_000}a]\n",
        "x = { " + '"=".' * 20_000 + "a = 1 }\n",
        "".join(f"a{n}.{'b.' * 200}c = 1\n" for n in range(2500)),
    ],
    ids=["key", "table", "quoted", "many"],
)
def test_keys_of_thousands_of_parts_are_refused_before_they_are_read(text: str) -> None:
    """Python's TOML takes n^2 steps, and n^2 pointers of memory, for one of n parts."""
    with cpu_time_below(0.5):
        assert "too many dots" in refusal(text)


GPUS = f"""
[model.g]
class = "gpu"
[[root]]
node = {[0] * 100}
domain = {[*range(100)]}
integrated = {["g"] * 31}
[[link]]
between = "g"
count = 1
"""


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (f"name = 'a'\ncore_groups = [{'{ cores = 8192 }, ' * 3000}]", "at most 8192 cores"),
        ("name = 'a'\npackages = 256\ncores_per_package = 8192", "at most 8192 CPUs"),
        (f"packages = 0x{'f' * 5000}", "more than 99 digits"),
        (TWO + GPUS, "at most 16384 links"),
    ],
    ids=["groups", "packages", "digits", "links"],
)
def test_a_short_file_of_a_vast_host_is_refused_at_once(text: str, words: str) -> None:
    with cpu_time_below(2.0):
        assert words in refusal(text)


def test_lists_of_hundreds_of_addresses_on_one_line_are_read() -> None:
    """They hold as many dots, and are no keys."""
    listed = ", ".join(f'"0000:{n:02x}:00.0"' for n in range(256))
    assert "too many dots" not in refusal(f"{TWO}unknown = [{', '.join([listed] * 10)}]\n")
    assert "expected TOML" in refusal("a = " + "[" * 5000)
    assert "expected TOML" in refusal("packages = " + "9" * 5000)
    assert "llc_size: expected a size with its unit" in refusal(f"llc_size = '{'9' * 5000}GiB'")
    assert "model.g.clas: unknown key" in refusal(TWO + "[model.g]\nclas = 'gpu'")
    assert "root[0].ports[1].switch[0].iommu_group: expected int >= 0, found -1" in refusal(
        TWO + "[[root]]\nports = ['gpu', { switch = [{ model = 'gpu', iommu_group = -1 }] }]"
    )


@pytest.mark.parametrize("place", ["$.zzz", "$.name", "$[3]", "$", "$.model[...]"])
@pytest.mark.parametrize("table", ["", "[model.x]\n"])
def test_a_key_that_looks_like_a_place_of_the_file_is_refused_by_name(
    table: str, place: str
) -> None:
    key = f"x - at `{place}"
    text = f'"{key}" = 1\n{TWO}' if not table else f'{TWO}{table}"{key}" = 1\n'
    assert f"{key}: unknown key" in refusal(text)


def test_a_host_too_large_to_be_one_is_refused_before_it_is_built() -> None:
    assert "8192 CPUs" in refusal(TWO.replace("cores_per_package = 2", "cores_per_package = 8192"))
    many = "[model.n]\nclass = 'nic'\ntotal_vfs = 250\nvfs = 250\n[[root]]\n"
    ports = f"node = {[0] * 99}\ndomain = {list(range(99))}\nports = ['n']"
    assert "at most 16384 functions" in refusal(TWO + many + ports)
    nested = "'gpu'"
    for _ in range(12):
        nested = f"{{ switch = [{nested}] }}"
    assert "at most 8 switches" in refusal(TWO + f"[[root]]\nnode = 0\nports = [{nested}]")


VALUES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-3, 300),
    st.sampled_from(["", "x", "0-3", "8GiB", "gpu", "32GT/s x16", "-1", "unknown", "none"]),
    st.lists(st.integers(-1, 40), max_size=3),
    st.lists(st.sampled_from(["gpu", "nic", "empty"]), max_size=3),
    st.dictionaries(st.sampled_from(["index", "model", "switch", "x"]), st.integers(0, 3)),
)


@settings(max_examples=120, deadline=None)
@given(st.sampled_from(["hgx-h100", "gh200x4", "mi350x-epyc9575f"]), st.data())
def test_any_value_in_any_place_is_read_or_refused(name: str, data: st.DataObject) -> None:
    """No wrong type or number anywhere in a file makes the parser fail in another way."""
    document = tomllib.loads((HOSTS / f"{name}.toml").read_text())
    at: object = document
    while True:
        keys = list(at) if isinstance(at, dict) else list(range(len(at)))  # type: ignore[arg-type]
        key = data.draw(st.sampled_from(keys))
        inner = at[key]  # type: ignore[index]
        if not isinstance(inner, dict | list) or not inner or data.draw(st.booleans()):
            at[key] = data.draw(VALUES)  # type: ignore[index]
            break
        at = inner
    try:
        parse_description(_toml(document), "host.toml")
    except InputError as error:
        assert error.message.startswith("host.toml: ")


def _toml(value: object) -> str:
    """A document with inline tables only."""
    assert isinstance(value, dict)
    return "\n".join(f"{key} = {_inline(each)}" for key, each in value.items() if each is not None)


def _inline(value: object) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int):
        return str(value)
    if isinstance(value, dict):
        pairs = (f'"{key}" = {_inline(each)}' for key, each in value.items() if each is not None)
        return f"{{ {', '.join(pairs)} }}"
    if isinstance(value, list):
        return f"[{', '.join(_inline(each) for each in value if each is not None)}]"
    return f'"{value}"'


def test_pu_lists_are_sets_of_the_host() -> None:
    host = host_of(TWO + 'disallowed_pus = "0-1"\n[settings]\nnohz_full = "2-3"')
    assert CpuSet(pu.index for pu in host.pus if not pu.allowed) == CpuSet.parse("0-1")
    assert CpuSet(pu.index for pu in host.pus if pu.nohz_full) == CpuSet.parse("2-3")
    assert "nohz_full=2-3" in (host.settings.kernel_command_line or "")


def test_the_example_in_the_document_is_a_host() -> None:
    document = (HOSTS.parents[3] / "docs" / "reference" / "formats" / "host-toml.md").read_text()
    machine, vm = re.findall(r"```toml\n(.*?)```", document, re.DOTALL)
    host = host_of(machine + vm)
    assert [domain.name for domain in host.domains] == ["train-1"]
    assert (len(host.packages), len(host.devices_of_kind(DeviceKind.GPU))) == (2, 4)


UNLIKE_CACHES = """
name = "x3d"
cores_per_package = 16
threads_per_core = 2
llcs_per_package = 2
memory_per_node = "64GiB"
"""


def test_last_level_caches_of_a_package_may_differ() -> None:
    described = parse_description(UNLIKE_CACHES + 'llc_sizes = ["96MiB", "32MiB"]', "x3d")
    host = described.host
    assert [(str(llc.pus), (llc.size_bytes or 0) >> 20) for llc in host.llcs] == [
        ("0-7,16-23", 96),
        ("8-15,24-31", 32),
    ]
    assert discover(render(described)).llcs == host.llcs
    with pytest.raises(InputError, match="one for each of the 2 caches"):
        parse_description(UNLIKE_CACHES + 'llc_sizes = ["96MiB"]', "x3d")
