"""Small trees of /sys as mappings, to be made odd by a test."""

from collections.abc import Mapping

from homenode.machine.snapshot.protocol import MemorySnapshot

CPU = "/sys/devices/system/cpu"
NODE = "/sys/devices/system/node"
PCI = "/sys/devices/pci0000:00"


def cpu_files(packages: int = 2, cores: int = 2, threads: int = 2) -> dict[str, str]:
    """Packages with a node and an L3 each; CPU = thread * all cores + core, as on x86 servers."""
    count = packages * cores * threads
    every = packages * cores
    files = {
        f"{CPU}/online": f"0-{count - 1}\n",
        f"{CPU}/possible": f"0-{count - 1}\n",
        f"{CPU}/present": f"0-{count - 1}\n",
        f"{CPU}/isolated": "\n",
        f"{CPU}/nohz_full": "  (null)\n",
        f"{NODE}/online": f"0-{packages - 1}\n",
        "/proc/self/status": f"Name:\tcat\nCpus_allowed_list:\t0-{count - 1}\n",
        "/proc/cpuinfo": "processor\t: 0\nvendor_id\t: GenuineIntel\ncpu family\t: 6\n"
        "model\t\t: 143\nmodel name\t: Some Xeon\nflags\t\t: fpu lm\n",
    }
    for package in range(packages):
        shared = ",".join(
            str(thread * every + package * cores + core)
            for thread in range(threads)
            for core in range(cores)
        )
        node = f"{NODE}/node{package}"
        files |= {
            f"{node}/cpulist": f"{shared}\n",
            f"{node}/distance": " ".join("10" if i == package else "21" for i in range(packages)),
            f"{node}/meminfo": f"Node {package} MemTotal:  1024 kB\nNode {package} MemFree: 512 kB",
            f"{node}/hugepages/hugepages-2048kB/nr_hugepages": "4\n",
            f"{node}/hugepages/hugepages-2048kB/free_hugepages": "3\n",
        }
        for core in range(cores):
            pus = [thread * every + package * cores + core for thread in range(threads)]
            for pu in pus:
                cpu = f"{CPU}/cpu{pu}"
                files |= {
                    f"{cpu}/topology/core_cpus_list": ",".join(map(str, pus)) + "\n",
                    f"{cpu}/topology/core_id": f"{core}\n",
                    f"{cpu}/topology/physical_package_id": f"{package}\n",
                    f"{cpu}/topology/die_id": "0\n",
                    f"{cpu}/cache/index0/level": "1\n",
                    f"{cpu}/cache/index0/type": "Data\n",
                    f"{cpu}/cache/index0/shared_cpu_list": ",".join(map(str, pus)) + "\n",
                    f"{cpu}/cache/index3/level": "3\n",
                    f"{cpu}/cache/index3/type": "Unified\n",
                    f"{cpu}/cache/index3/size": "32768K\n",
                    f"{cpu}/cache/index3/shared_cpu_list": f"{shared}\n",
                }
    return files


def pci_function(path: str, class_code: str, ids: str, node: int = 0) -> dict[str, str]:
    """Files of one function; path below PCI ("0000:00:01.0/0000:01:00.0"), ids "10de:2330"."""
    vendor, _, device = ids.partition(":")
    directory = f"{PCI}/{path}"
    return {
        f"{directory}/class": f"0x{class_code}\n",
        f"{directory}/vendor": f"0x{vendor}\n",
        f"{directory}/device": f"0x{device}\n",
        f"{directory}/numa_node": f"{node}\n",
    }


def snapshot(
    files: Mapping[str, str],
    *,
    links: Mapping[str, str] | None = None,
    commands: Mapping[str, str] | None = None,
    without: tuple[str, ...] = (),
) -> MemorySnapshot:
    """A snapshot with a link in /sys/bus/pci/devices for each PCI function in `files`.

    without: files whose paths hold any of these are omitted.
    """
    kept = {path: text for path, text in files.items() if not any(part in path for part in without)}
    directories = {path.rpartition("/")[0] for path in kept if path.endswith("/class")}
    pci_links = {
        f"/sys/bus/pci/devices/{directory.rpartition('/')[2]}": directory
        for directory in directories
    }
    return MemorySnapshot("a tree", kept, {**pci_links, **(links or {})}, commands or {})
