"""Discovery of CPUs, caches, nodes and memory from trees of /sys, even and odd."""

import random

import pytest

from homenode.cpuset import CpuSet
from homenode.errors import HomenodeError, HostError, InputError, ParseError
from homenode.machine.discover.host import discover
from homenode.machine.snapshot.protocol import MemorySnapshot
from homenode.machine.topology import CoreKind, Host, MemoryKind, PagePool, summarise
from tests.sysfs_trees import CPU, NODE, PCI, cpu_files, pci_function, snapshot


def _subjects(host: Host) -> list[str]:
    return [gap.subject for gap in host.gaps]


def test_an_even_tree_is_read_whole() -> None:
    host = discover(snapshot(cpu_files()))
    counts = summarise(host)
    assert (counts.packages, counts.cores, counts.pus) == (2, 4, 8)
    assert (counts.llcs, counts.numa_nodes) == (2, 2)
    assert [str(core.pus) for core in host.cores] == ["0,4", "1,5", "2,6", "3,7"]
    assert [core.id for core in host.cores] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert [(str(llc.pus), llc.size_bytes) for llc in host.llcs] == [
        ("0-1,4-5", 32 << 20),
        ("2-3,6-7", 32 << 20),
    ]
    assert host.distances == ((10, 21), (21, 10))
    node = host.nodes[1]
    assert (node.memory_bytes, node.memory_free_bytes, node.package) == (1 << 20, 512 << 10, 1)
    assert node.page_pools == (PagePool(2 << 20, 4, 3),)
    assert (host.architecture, host.cpu.name, host.cpu.model) == ("x86_64", "Some Xeon", 143)
    assert [(pu.index, pu.core, pu.llc, pu.node, pu.die) for pu in host.pus][5:7] == [
        (5, 1, 0, 0, 0),
        (6, 2, 1, 1, 0),
    ]


@pytest.mark.parametrize("threads", [1, 4, 8])
def test_cores_have_as_many_siblings_as_the_kernel_lists(threads: int) -> None:
    host = discover(snapshot(cpu_files(packages=1, cores=3, threads=threads)))
    assert [len(core.pus) for core in host.cores] == [threads] * 3


def test_siblings_are_found_by_masks_and_old_names() -> None:
    files = cpu_files(packages=1, cores=1, threads=2)
    for pu in (0, 1):
        del files[f"{CPU}/cpu{pu}/topology/core_cpus_list"]
        files[f"{CPU}/cpu{pu}/topology/thread_siblings"] = "00000000,00000003\n"
        del files[f"{CPU}/cpu{pu}/cache/index3/shared_cpu_list"]
        files[f"{CPU}/cpu{pu}/cache/index3/shared_cpu_map"] = "3\n"
    host = discover(snapshot(files))
    assert [str(core.pus) for core in host.cores] == ["0-1"]
    assert [str(llc.pus) for llc in host.llcs] == ["0-1"]


def test_ids_that_repeat_do_not_merge_cores_or_caches() -> None:
    files = cpu_files()
    for pu in range(8):
        files[f"{CPU}/cpu{pu}/topology/core_id"] = "0\n"
        files[f"{CPU}/cpu{pu}/cache/index3/id"] = "0\n"
    counts = summarise(discover(snapshot(files)))
    assert (counts.cores, counts.llcs) == (4, 2)


def test_offline_pus_are_kept_apart_and_belong_to_nothing() -> None:
    files = cpu_files()
    files[f"{CPU}/online"] = "0-5\n"
    host = discover(snapshot(files, without=("/cpu6/topology", "/cpu7/topology", "/cpu7/cache")))
    assert summarise(host).pus_offline == 2
    assert [str(core.pus) for core in host.cores] == ["0,4", "1,5", "2", "3"]
    assert host.pus[7].core is None and host.pus[7].node is None and not host.pus[7].online
    assert [str(llc.pus) for llc in host.llcs] == ["0-1,4-5", "2-3"]


def test_cpu_and_node_numbers_may_have_holes() -> None:
    files = cpu_files(packages=1, cores=2, threads=1)
    moved = {
        path.replace("/cpu1/", "/cpu9/").replace("/node0/", "/node8/"): text
        for path, text in files.items()
    }
    moved |= {
        f"{CPU}/online": "0,9\n",
        f"{CPU}/present": "0,9\n",
        f"{CPU}/cpu9/topology/core_cpus_list": "9\n",
        f"{CPU}/cpu0/cache/index3/shared_cpu_list": "0,9\n",
        f"{NODE}/online": "8\n",
        f"{NODE}/node8/cpulist": "0,9\n",
    }
    host = discover(snapshot(moved))
    assert [pu.index for pu in host.pus] == [0, 9]
    assert [node.index for node in host.nodes] == [8]
    assert host.pus[1].node == 8 and host.distances == ((10,),)


def test_an_online_pu_without_a_directory_is_an_incomplete_tree() -> None:
    with pytest.raises(InputError, match="lists CPUs 0-7, but CPUs 5 have no directory") as error:
        discover(snapshot(cpu_files(), without=("/cpu5/",)))
    assert error.value.hint


@pytest.mark.parametrize(
    ("without", "named"),
    [
        ("/cpu3/topology", r"no .*/topology for online CPUs 3"),
        ("/node1/", "lists nodes 0-1, but nodes 1 have no directory"),
        ("/node1/cpulist", "node1/cpulist or cpumap"),
    ],
)
def test_a_tree_without_what_it_lists_is_incomplete(without: str, named: str) -> None:
    with pytest.raises(InputError, match=named):
        discover(snapshot(cpu_files(), without=(without,)))


def test_a_node_with_pus_of_a_lower_one_is_left_out_and_named() -> None:
    files = cpu_files(packages=3)
    files[f"{NODE}/node1/cpulist"] = "1-3,8-9\n"
    files[f"{NODE}/node2/distance"] = "31 21 10"
    host = discover(snapshot(files))
    assert [node.index for node in host.nodes] == [0, 2]
    assert host.distances == ((10, 21), (31, 10))
    assert any(gap.subject == "node 1" and "CPUs 1 " in gap.reason for gap in host.gaps)
    assert {pu.index for pu in host.pus if pu.node is None} == {2, 3, 8, 9}


def test_a_cache_whose_list_of_pus_is_empty_is_its_cores_own() -> None:
    files = cpu_files()
    for pu in range(8):
        files[f"{CPU}/cpu{pu}/cache/index3/shared_cpu_list"] = "\n"
        files[f"{CPU}/cpu{pu}/cache/index3/shared_cpu_map"] = "00000000,00000000\n"
    host = discover(snapshot(files))
    assert {llc.pus for llc in host.llcs} == {core.pus for core in host.cores}
    assert any("is empty" in gap.reason for gap in host.gaps)


def test_where_a_caches_list_does_not_hold_the_pu_its_map_counts() -> None:
    files = cpu_files()
    expected = {llc.pus for llc in discover(snapshot(files)).llcs}
    for pu in range(8):
        cache = f"{CPU}/cpu{pu}/cache/index3"
        files[f"{cache}/shared_cpu_map"] = "33" if pu in (0, 1, 4, 5) else "cc"
        files[f"{cache}/shared_cpu_list"] = f"{(pu + 1) % 8}\n"
    assert {llc.pus for llc in discover(snapshot(files)).llcs} == expected


def test_a_tree_without_cpus_says_what_was_expected() -> None:
    with pytest.raises(InputError, match="no directory /sys/devices/system/cpu/cpuN"):
        discover(snapshot({"/sys/kernel/mm/ksm/run": "0"}))


def test_a_file_that_is_no_list_is_named() -> None:
    files = cpu_files()
    files[f"{NODE}/node0/cpulist"] = "0-banana\n"
    with pytest.raises(ParseError, match="a tree: /sys/devices/system/node/node0/cpulist"):
        discover(snapshot(files))


def test_without_a_node_directory_the_host_is_one_node_and_says_so() -> None:
    files = cpu_files() | {"/proc/meminfo": "MemTotal:       2048 kB\nMemFree:        1024 kB\n"}
    host = discover(snapshot(files, without=("/sys/devices/system/node",)))
    assert [(n.index, len(n.pus), n.memory_bytes) for n in host.nodes] == [(0, 8, 2 << 20)]
    assert "NUMA nodes" in _subjects(host)


@pytest.mark.parametrize("without", ["/cache/", "/cache/index3"])
def test_without_caches_or_with_those_of_level_1_no_llc_is_made_up(without: str) -> None:
    host = discover(snapshot(cpu_files(), without=(without,)))
    assert host.llcs == () and all(pu.llc is None for pu in host.pus)
    assert "last-level cache of CPUs 0-7" in _subjects(host)


def test_the_llc_of_a_core_outside_the_l3_is_its_own_highest_cache() -> None:
    files = cpu_files(packages=1, cores=2, threads=1)
    files[f"{CPU}/cpu0/cache/index3/shared_cpu_list"] = "0\n"
    files |= {f"{CPU}/cpu1/cache/index3/level": "2\n"}
    files[f"{CPU}/cpu1/cache/index3/shared_cpu_list"] = "1\n"
    host = discover(snapshot(files))
    assert [(str(llc.pus), llc.level) for llc in host.llcs] == [("0", 3), ("1", 2)]


@pytest.mark.parametrize(
    ("vendor", "family", "cores", "subject"),
    [
        ("AuthenticAMD", 21, ["0", "1", "2", "3"], "cores of CPUs 0-3"),
        ("AuthenticAMD", 22, ["0", "1", "2", "3"], "cores of CPUs 0-3"),
        ("AuthenticAMD", 23, ["0,2", "1,3"], "core ids of CPUs 0-3"),
        ("GenuineIntel", 21, ["0,2", "1,3"], "core ids of CPUs 0-3"),
        (None, None, ["0,2", "1,3"], "core ids of CPUs 0-3"),
    ],
)
def test_siblings_with_core_ids_of_their_own_are_cores_on_amd_families_15h_and_16h_only(
    vendor: str | None, family: int | None, cores: list[str], subject: str
) -> None:
    files = cpu_files(packages=1, cores=2, threads=2)
    files["/proc/cpuinfo"] = f"vendor_id : {vendor}\ncpu family : {family}\n" if vendor else ""
    for pu in range(4):
        files[f"{CPU}/cpu{pu}/topology/core_id"] = f"{pu}\n"
    host = discover(snapshot(files))
    assert [str(core.pus) for core in host.cores] == cores
    assert subject in _subjects(host)


def test_the_pus_of_a_module_share_a_cache_whose_list_of_pus_is_empty() -> None:
    files = cpu_files(packages=1, cores=2, threads=2)
    files["/proc/cpuinfo"] = "vendor_id : AuthenticAMD\ncpu family : 21\n"
    for pu in range(4):
        files[f"{CPU}/cpu{pu}/topology/core_id"] = f"{pu}\n"
        files[f"{CPU}/cpu{pu}/cache/index3/shared_cpu_list"] = "\n"
        files[f"{CPU}/cpu{pu}/cache/index3/shared_cpu_map"] = "0\n"
    host = discover(snapshot(files))
    assert [str(core.pus) for core in host.cores] == ["0", "1", "2", "3"]
    assert [str(llc.pus) for llc in host.llcs] == ["0,2", "1,3"]


def test_clusters_of_cores_that_nothing_else_shows_are_a_gap() -> None:
    files = cpu_files(packages=1, cores=4, threads=1)
    for pu in range(4):
        files[f"{CPU}/cpu{pu}/topology/cluster_cpus_list"] = "0-3\n"
    assert not any("clusters" in one for one in _subjects(discover(snapshot(files))))
    for pu in range(4):
        files[f"{CPU}/cpu{pu}/topology/cluster_cpus_list"] = "0-1\n" if pu < 2 else "2-3\n"
    assert "clusters of CPUs 0-3" in _subjects(discover(snapshot(files)))
    files |= {f"{CPU}/cpu{pu}/cache/index2/shared_cpu_list": "0-1\n" for pu in (0, 1)}
    assert "clusters of CPUs 2-3" in _subjects(discover(snapshot(files)))


def test_zeros_at_the_end_of_any_file_change_nothing() -> None:
    files = cpu_files() | pci_function("0000:00:01.0", "030200", "10de:2330")
    files[f"{PCI}/0000:00:01.0/resource"] = "0x0 0x1000 0x200\n"
    files[f"{NODE}/node0/cpumap"] = "00000000,00000033\n"
    files[f"{NODE}/node1/cpumap"] = "000000cc"
    expected = discover(snapshot(files))
    padded = {path: f"{text}\0" for path, text in files.items()}
    assert discover(snapshot(padded)) == expected
    only_masks = {path: text for path, text in padded.items() if "cpulist" not in path}
    assert discover(snapshot(only_masks)).nodes == expected.nodes


def test_an_unreadable_directory_of_nodes_or_cpus_is_refused_and_not_mistaken_for_absent() -> None:
    for directory in (NODE, CPU):
        files = {path: text for path, text in cpu_files().items() if not path.startswith(directory)}
        hidden = MemorySnapshot("a tree", {**files, directory: ""})  # there, and gives no names
        with pytest.raises(HostError, match=f"{directory}: permission denied"):
            discover(hidden)


@pytest.mark.parametrize("number", [99_999, 65_536, 999_999])
def test_a_directory_of_an_impossible_number_is_named(number: int) -> None:
    for directory, name in ((NODE, "node"), (CPU, "cpu")):
        files = cpu_files() | {f"{directory}/{name}{number}/cpulist": "\n"}
        with pytest.raises(ParseError, match=f"directories {name}0 to {name}65535.*{name}{number}"):
            discover(snapshot(files))


@pytest.mark.parametrize(
    "files",
    [
        {f"{CPU}/cpu1/topology/core_cpus_list": "1\n", f"{CPU}/cpu3/topology/core_cpus_list": "3"},
        {f"{CPU}/cpu1/cache/index0/size": "32K\n"},
        {"/proc/cpuinfo": "processor : 0\nCPU part : 0xd87\nprocessor : 1\nCPU part : 0xd85\n"},
    ],
)
def test_cores_that_differ_without_a_known_kind_are_a_gap(files: dict[str, str]) -> None:
    alike = cpu_files(packages=1, cores=2, threads=2)
    alike |= {f"{CPU}/cpu{pu}/cache/index0/size": "48K\n" for pu in range(4)}
    assert "kinds of core" not in _subjects(discover(snapshot(alike)))
    host = discover(snapshot(alike | files))
    assert {core.kind for core in host.cores} == {None}
    assert "kinds of core" in _subjects(host)


def test_an_offline_sibling_makes_no_other_kind_of_core() -> None:
    files = cpu_files(packages=1, cores=2, threads=2) | {f"{CPU}/online": "0-2\n"}
    assert "kinds of core" not in _subjects(discover(snapshot(files)))


def test_lists_of_siblings_that_disagree_are_a_gap() -> None:
    files = cpu_files(packages=1, cores=2, threads=2)
    files[f"{CPU}/cpu2/topology/core_cpus_list"] = "2-3\n"
    host = discover(snapshot(files))
    assert [str(core.pus) for core in host.cores] == ["0,2", "1,3"]
    assert "core of CPU 2" in _subjects(host)


def test_packages_without_numbers_are_numbered_by_their_lists() -> None:
    files = cpu_files(packages=2, cores=1, threads=1)
    for pu in (0, 1):
        files[f"{CPU}/cpu{pu}/topology/physical_package_id"] = "-1\n"
        files[f"{CPU}/cpu{pu}/topology/package_cpus_list"] = f"{pu}\n"
    host = discover(snapshot(files))
    assert [(p.index, str(p.pus)) for p in host.packages] == [(0, "0"), (1, "1")]
    assert "package numbers" in _subjects(host)


def test_without_die_ids_dies_are_unknown() -> None:
    host = discover(snapshot(cpu_files(), without=("die_id",)))
    assert {pu.die for pu in host.pus} == {None}
    assert "die of CPUs 0-7" in _subjects(host)


def test_kinds_of_core_come_from_the_pmus_first() -> None:
    files = cpu_files(packages=1, cores=3, threads=1)
    files |= {"/sys/devices/cpu_core/cpus": "0\n", "/sys/devices/cpu_atom/cpus": "1-2\n"}
    kinds = [core.kind for core in discover(snapshot(files)).cores]
    assert kinds == [CoreKind.PERFORMANCE, CoreKind.EFFICIENCY, CoreKind.EFFICIENCY]


@pytest.mark.parametrize("file", ["cpu_capacity", "cpufreq/cpuinfo_max_freq"])
def test_kinds_of_core_come_from_speed_where_nothing_else_tells(file: str) -> None:
    files = cpu_files(packages=1, cores=3, threads=1)
    files |= {f"{CPU}/cpu{pu}/{file}": speed for pu, speed in enumerate(("400", "1000", "1024"))}
    kinds = [core.kind for core in discover(snapshot(files)).cores]
    assert kinds == [CoreKind.EFFICIENCY, CoreKind.PERFORMANCE, CoreKind.PERFORMANCE]


def test_equal_cores_with_raised_base_frequency_are_alike() -> None:
    files = cpu_files(packages=1, cores=2, threads=1)
    for pu, base in enumerate(("2100000", "2700000")):
        files[f"{CPU}/cpu{pu}/cpufreq/base_frequency"] = base
        files[f"{CPU}/cpu{pu}/cpufreq/cpuinfo_max_freq"] = "3900000"
    assert {core.kind for core in discover(snapshot(files)).cores} == {None}


def test_isolated_and_tickless_pus_are_marked() -> None:
    files = cpu_files()
    files |= {f"{CPU}/isolated": "1,5\n", f"{CPU}/nohz_full": "5\n"}
    host = discover(snapshot(files))
    assert [pu.index for pu in host.pus if pu.isolated] == [1, 5]
    assert [pu.index for pu in host.pus if pu.nohz_full] == [5]


def test_isolated_pus_come_from_the_command_line_where_the_kernel_has_no_file() -> None:
    files = cpu_files() | {"/proc/cmdline": "ro isolcpus=managed_irq,domain,2-3 nohz_full=all"}
    host = discover(snapshot(files, without=("/isolated", "/nohz_full")))
    assert [pu.index for pu in host.pus if pu.isolated] == [2, 3]
    assert not any(pu.nohz_full for pu in host.pus)


EFFECTIVE = "cpuset.cpus.effective"
MOUNTS = "cgroup /cs cgroup rw,cpuset,cpu 0 0\nx /my\\040place cgroup2 rw 0 0\n"
NO_STATUS = {"/proc/self/status": "Name:\tcat\n"}


@pytest.mark.parametrize(
    ("allowed", "files"),
    [
        ("0-3", {"/proc/self/cgroup": "0::/a/job\n", f"/sys/fs/cgroup/a/job/{EFFECTIVE}": "0-3\n"}),
        (
            "3",  # of a cpuset that is mounted elsewhere
            {
                **NO_STATUS,
                "/proc/mounts": MOUNTS,
                "/proc/self/cgroup": "4:cpu,cpuset:/job\n0::/\n",
                "/cs/job/cpuset.cpus": "3\n",
            },
        ),
        ("1", {"/proc/self/cpuset": "/job\n", "/dev/cpuset/job/cpus": "1\n"}),
        ("0-1", {"/proc/self/status": "Cpus_allowed_list:\t0-1\n"}),
        ("2-7", {f"/sys/fs/cgroup/machine.slice/{EFFECTIVE}": "2-7\n"}),  # systemd keeps others
        ("0-7", {"/proc/self/cgroup": "0::/../../etc\n"}),  # no path leaves its mount
    ],
)
def test_cgroups_and_the_status_say_which_pus_are_allowed(
    allowed: str, files: dict[str, str]
) -> None:
    host = discover(snapshot(cpu_files() | files))
    assert str(CpuSet(pu.index for pu in host.pus if pu.allowed)) == allowed
    assert summarise(host).pus_disallowed == 8 - len(CpuSet.parse(allowed))


@pytest.mark.parametrize(
    "files",
    [
        {"/proc/self/cpuset": "/jobs/one\n"},
        {"/proc/self/cgroup": "0::/jobs/one\n"},
        {"/proc/self/cgroup": "0::/jobs/one/without/cpusets\n"},
        {"/proc/self/cgroup": "1:name=systemd:/\n0::/jobs/one\n\0"},
    ],
)
@pytest.mark.parametrize("mount", ["/sys/fs/cgroup", "/sys/fs/cgroup/unified", "/cg"])
def test_a_cgroup_of_version_2_is_read_without_a_status_file(
    files: dict[str, str], mount: str
) -> None:
    files = cpu_files() | files | {f"{mount}/jobs/one/cpuset.cpus.effective": "0-1\n"}
    files["/proc/mounts"] = f"sysfs /sys sysfs rw 0 0\ncgroup2 {mount} cgroup2 rw 0 0\n"
    host = discover(snapshot(files, without=("/proc/self/status",)))
    assert summarise(host).pus_disallowed == 6
    assert "CPUs disallowed by a cgroup" not in _subjects(host)


def test_a_node_without_pus_has_memory_of_unknown_kind() -> None:
    files = cpu_files() | {
        f"{NODE}/online": "0-2\n",
        f"{NODE}/node2/cpulist": "\n",
        f"{NODE}/node2/meminfo": "Node 2 MemTotal: 4096 kB\nNode 2 MemFree: 4096 kB\n",
        f"{NODE}/node2/distance": "20 30 10\n",
        f"{NODE}/node0/distance": "10 21 20\n",
        f"{NODE}/node1/distance": "21 10 30\n",
    }
    host = discover(snapshot(files))
    assert summarise(host).cpuless_nodes == 1
    node = host.nodes[2]
    assert (node.pus, node.memory_kind, node.package) == (CpuSet(), None, None)
    assert "node 2 kind of memory" in _subjects(host)


@pytest.mark.parametrize(
    ("extra", "kind"),
    [
        ({"/proc/driver/nvidia/gpus/0000:09:00.0/numa_status": "Node: 2\nStatus: online\n"}, "gpu"),
        ({"/sys/bus/dax/devices/dax0.0/target_node": "2\n"}, "other"),
        ({"/proc/driver/nvidia/gpus/0000:09:00.0/numa_status": "Node: -1\n"}, None),
    ],
)
def test_the_driver_and_dax_say_what_a_nodes_memory_is(
    extra: dict[str, str], kind: str | None
) -> None:
    files = {
        f"{NODE}/online": "0,2\n",
        f"{NODE}/node2/cpulist": "\n",
        f"{NODE}/node2/meminfo": "Node 2 MemTotal: 4096 kB\n",
        f"{NODE}/node2/distance": "40 10\n",
        f"{NODE}/node0/distance": "10 40\n",
    }
    node = discover(snapshot(cpu_files(packages=1) | extra | files)).nodes[1]
    assert node.memory_kind == (None if kind is None else MemoryKind(kind))
    assert (str(node.gpu) == "0000:09:00.0") is (kind == "gpu")


def test_distances_that_do_not_fit_the_nodes_are_unknown() -> None:
    files = cpu_files() | {f"{NODE}/node1/distance": "21 10 40\n"}
    host = discover(snapshot(files))
    assert host.distances is None
    assert "distances" in _subjects(host)


def test_memory_that_the_node_does_not_tell_is_unknown() -> None:
    host = discover(snapshot(cpu_files(), without=("/node1/meminfo",)))
    assert host.nodes[1].memory_bytes is None
    assert summarise(host).memory_bytes is None
    assert {"node 1 memory", "node 1 free memory"} <= set(_subjects(host))


def test_settings_are_what_the_system_says() -> None:
    files = cpu_files() | {
        "/proc/sys/kernel/osrelease": "6.8.0-45-generic\n",
        "/proc/cmdline": "ro hugepagesz=1G\n",
        f"{CPU}/smt/control": "on\n",
        f"{CPU}/cpu0/cpufreq/scaling_governor": "powersave\n",
        f"{CPU}/cpu1/cpufreq/scaling_governor": "performance\n",
        "/sys/kernel/mm/transparent_hugepage/enabled": "always [madvise] never\n",
        "/proc/sys/kernel/numa_balancing": "1\n",
    }
    settings = discover(snapshot(files)).settings
    assert (settings.kernel_release, settings.smt_control) == ("6.8.0-45-generic", "on")
    assert settings.governors == ("performance", "powersave")
    assert (settings.transparent_hugepages, settings.numa_balancing) == ("madvise", 1)


@pytest.mark.parametrize(
    ("cpuinfo", "vendor", "name", "architecture"),
    [
        ("CPU implementer\t: 0x41\nCPU architecture: 8\n", "ARM", None, "aarch64"),
        ("CPU implementer\t: 0x43\nCPU architecture: 8\n", "Cavium", None, "aarch64"),
        ("CPU implementer\t: 0x46\nCPU architecture: 8\n", "Fujitsu", None, "aarch64"),
        ("cpu\t\t: POWER9, altivec supported\n", "IBM", "POWER9", None),
        ("", None, None, None),
    ],
)
def test_cpus_that_are_not_x86_are_named_as_far_as_known(
    cpuinfo: str, vendor: str | None, name: str | None, architecture: str | None
) -> None:
    host = discover(snapshot(cpu_files() | {"/proc/cpuinfo": cpuinfo}))
    assert (host.cpu.vendor, host.cpu.name, host.architecture) == (vendor, name, architecture)
    host = discover(snapshot(cpu_files(), commands={"uname": "Linux 6.8 #1 SMP aarch64\n"}))
    assert host.architecture == "aarch64"


def test_siblings_without_core_ids_are_still_one_core() -> None:
    host = discover(snapshot(cpu_files(), without=("core_id",)))
    assert [str(core.pus) for core in host.cores] == ["0,4", "1,5", "2,6", "3,7"]
    assert [core.id for core in host.cores] == [(0, 0), (0, 1), (1, 2), (1, 3)]


def test_whatever_goes_missing_no_machine_gets_smaller_in_silence() -> None:
    pci = pci_function("0000:00:01.0", "060400", "8086:352a") | pci_function(
        "0000:00:01.0/0000:01:00.0", "030200", "10de:2330"
    )
    whole = snapshot(cpu_files(packages=2, cores=1, threads=2) | pci)
    expected = discover(whole)
    paths = {*whole.files, *whole.links}
    for path in [*paths]:
        while path := path.rpartition("/")[0]:
            paths.add(path)
    for gone in sorted(paths):
        files, links = (
            {p: text for p, text in part.items() if p != gone and not p.startswith(f"{gone}/")}
            for part in (whole.files, whole.links)
        )
        try:
            host = discover(MemorySnapshot("a tree", files, links))
        except InputError:
            continue
        if summarise(host) != summarise(expected):
            assert set(host.gaps) - set(expected.gaps), f"without {gone}"


def test_mutated_trees_are_read_or_refused_and_nothing_else() -> None:
    rng = random.Random(3)
    base = cpu_files() | pci_function("0000:00:01.0", "060400", "8086:352a")
    for _ in range(500):
        files = dict(base)
        for path in rng.sample(sorted(files), 3):
            text = list(files[path]) or [" "]
            text[rng.randrange(len(text))] = rng.choice("0-,x9f \n\0é")
            files[path] = rng.choice(["".join(text), "-1", "9" * 30, "0-65535", "(null)"])
        try:
            discover(snapshot(files))
        except HomenodeError:
            continue


def test_page_cache_counts_as_free_memory_for_a_vm_that_starts_now() -> None:
    meminfo = (
        "MemTotal:       65536 kB\nMemFree:        1024 kB\nActive(file):   2048 kB\n"
        "Inactive(file): 4096 kB\nSReclaimable:   512 kB\nShmem:          9999 kB\n"
    )
    files = cpu_files() | {"/proc/meminfo": meminfo}
    host = discover(snapshot(files, without=("/sys/devices/system/node",)))
    assert host.nodes[0].memory_free_bytes == (1024 + 2048 + 4096 + 512) * 1024
