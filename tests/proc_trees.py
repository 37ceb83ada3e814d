"""Trees of /proc and /sys with a QEMU in them, as the kernel of a 2-node host shows one."""

import json
from collections.abc import Mapping
from pathlib import Path

from homenode.vm.model import Vm

UUID = "11111111-2222-4333-8444-555555555555"
MIB = 1 << 20
PID = 4242
BARE = Vm(name="bare", vcpus=1, memory_bytes=0)
"""A VM of which nothing is expected."""


class ProcTree:
    """2 nodes of 4 cores with 2 CPUs each: node 0 has CPUs 0-3 and 8-11, node 1 the others."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.put("sys/devices/system/cpu/online", "0-15\n")
        self.put("sys/devices/system/node/node0/cpulist", "0-3,8-11\n")
        self.put("sys/devices/system/node/node1/cpulist", "4-7,12-15\n")
        for pu in range(16):
            first = pu % 8
            self.put(
                f"sys/devices/system/cpu/cpu{pu}/topology/thread_siblings_list",
                f"{first},{first + 8}\n",
            )
        self.put("proc/meminfo", "MemTotal: 9 kB\nHugepagesize:       2048 kB\n")
        self.put("proc/interrupts", "")

    def put(self, path: str, text: str) -> None:
        file = self.root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)

    def process(
        self, pid: int, threads: dict[str, str], argv: tuple[str, ...] = (), *, flags: int = 0
    ) -> None:
        """threads: name -> the CPUs it may run on; the first is the process itself."""
        self.put(f"proc/{pid}/cmdline", "".join(f"{word}\0" for word in argv))
        self.put(f"proc/{pid}/status", "Name: x\nVmSwap:\t       0 kB\n")
        for i, (name, allowed) in enumerate(threads.items()):
            task = f"proc/{pid}/task/{pid + i}"
            self.put(f"{task}/comm", f"{name}\n")
            self.put(f"{task}/status", f"Name:\t{name}\nCpus_allowed_list:\t{allowed}\n")
            self.put(f"{task}/stat", f"{pid + i} ({name} (x) S) S {stat_fields(flags)}\n")

    def qemu(
        self,
        threads: dict[str, str],
        cells: tuple[tuple[int, str], ...],
        *,
        pid: int = PID,
        uuid: str = UUID,
        name: str = "vm",
        more: Mapping[str, tuple[int, str]] | None = None,
    ) -> None:
        """cells: (MiB, host nodes) of each, on QEMU's command line. more: other backends, by id."""
        argv = ["/usr/bin/qemu-system-x86_64", "-name", f"guest={name},debug-threads=on"]
        named = {f"ram-node{i}": cell for i, cell in enumerate(cells)} | dict(more or {})
        for backend_id, (mib, nodes) in named.items():
            backend: dict[str, object] = {
                "qom-type": "memory-backend-ram",
                "id": backend_id,
                "size": mib * MIB,
            }
            if nodes:
                backend |= {"host-nodes": [int(n) for n in nodes.split(",")], "policy": "bind"}
            argv += ["-object", json.dumps(backend)]
        self.process(pid, {"qemu-system-x86": "0", **threads}, (*argv, "-uuid", uuid))

    def memory(self, areas: tuple[tuple[int, str], ...], pid: int = PID) -> None:
        """areas: (MiB, the rest of the line in numa_maps) of each mapping, with a guard between."""
        maps, numa_maps, start = [], [], 0x7F00_0000_0000
        for mib, rest in areas:
            end = start + mib * MIB
            maps.append(f"{start:x}-{end:x} rw-p 00000000 00:00 0 \n")
            maps.append(f"{end:x}-{end + 4096:x} ---p 00000000 00:00 0 \n")
            numa_maps.append(f"{start:x} {rest}\n{end:x} default\n")
            start = end + 4096
        self.put(f"proc/{pid}/maps", "".join(maps))
        self.put(f"proc/{pid}/numa_maps", "".join(numa_maps))


def stat_fields(flags: int) -> str:
    """Fields 4 to 52 of a stat line of a task that ran on CPU 0 for a second."""
    fields = ["0"] * 49
    fields[5], fields[10], fields[35] = str(flags), "100", "0"
    return " ".join(fields)
