"""Contents: the one table of every path and every command that homenode reads, and why.

The same table captures (gather.py, collector.py) and validates: a file that does
not have its form is left out of a capture, so that nothing foreign comes along.

Source: Documentation/ABI/{stable,testing}/sysfs-* and Documentation/filesystems/proc.rst of the
Linux kernel 6.12; for each tool see tools/.
"""

import re
from enum import Enum, StrEnum

from msgspec import Struct


class Kind(StrEnum):
    """What a path is."""

    FILE = "file"
    LINK = "link"
    FOLDER = "folder"  # only that it is there
    CONFIG = "config"  # PCI configuration space, binary; of bridges only
    TABLE = "table"  # an ACPI table, binary


_BDF = r"[0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]"
_UUID = r"[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}"
_WAY = r"(?:[A-Za-z0-9_.:@-]{1,80}/){0,40}"  # pci0000:17/0000:17:01.0/, platform/.../


class Form(Enum):
    """What the text of a file looks like; the value is a regular expression."""

    NUMBER = r"-?\d{1,20}"
    HEX = r"(?:0x)?[0-9a-fA-F]{1,8}"
    # PUs or nodes: "0-3,8"; nothing on a node without CPUs; "(null)" where nohz_full= is not given
    LIST = r"\d{1,6}(?:-\d{1,6})?(?:,\d{1,6}(?:-\d{1,6})?)*|\(null\)|"
    MASK = r"[0-9a-f]{1,8}(?:,[0-9a-f]{1,8}){0,2047}"
    NUMBERS = r"\d{1,6}(?: +\d{1,6})*"
    WORD = r"[A-Za-z][A-Za-z0-9_-]{0,30}|\d{1,2}"  # "on", "Unified", "amd-pstate-epp"; SMT 4
    COUNTS = r"[A-Za-z_]{1,40} \d{1,20}"  # each line: "RxErr 0"
    CHOICE = r"\[?[a-z+]{2,15}\]?(?: \[?[a-z+]{2,15}\]?){1,6}"  # "always [madvise] never"
    SIZE = r"\d{1,12}[KMG]?"
    SPEED = r"(?:\d{1,3}(?:\.\d)? GT/s(?: PCIe)?|Unknown(?: speed)?)"
    NAME = r"[^\n]{0,400}"  # one line of free text
    COMMAND_LINE = r"[^\n]{0,16384}"
    RESOURCE = r"0x[0-9a-f]{16} 0x[0-9a-f]{16} 0x[0-9a-f]{16}"  # each line
    FIELDS = r"[A-Za-z0-9_()][A-Za-z0-9_() ]{0,60}\t*:[^\n]{0,8000}"  # each line: "key: value"
    NODE_MEMINFO = r"Node \d+ [A-Za-z0-9_()]{1,40}:\s+\d+(?: kB)?"  # each line

    # Where links lead: to names that the kernel gives
    TO_DAX = rf"(?:\.\./)+devices/{_WAY}dax\d{{1,4}}\.\d{{1,4}}"
    TO_MEDIATED = rf"(?:\.\./)+devices/{_WAY}{_UUID}"
    TO_MEDIATED_TYPE = r"(?:\.\./)+mdev_supported_types/[A-Za-z0-9_-]{1,60}"
    TO_POLICY = r"\.\./cpufreq/policy\d{1,6}"
    TO_NODE = r"(?:\.\./)+node\d{1,6}"
    TO_DEVICE = rf"(?:\.\./)+(?:devices/{_WAY})?{_BDF}"
    TO_DRIVER = r"(?:\.\./)+bus/[a-z]{2,12}/drivers/[A-Za-z0-9_-]{1,40}"
    TO_GROUP = r"(?:\.\./)+kernel/iommu_groups/\d{1,8}"
    TO_BUS = rf"(?:\.\./)+devices/{_WAY}pci_bus/[0-9a-f]{{4,8}}:[0-9a-f]{{2}}"
    TO_IOMMU = rf"(?:\.\./)+devices/{_WAY}iommu/[a-z]{{2,8}}[a-z0-9._-]{{0,30}}"

    def matches(self, text: str) -> bool:
        """True where the whole text, but for white space around it, has the form.

        White space alone has every form: a file may say nothing.
        """
        # By line, because a pattern that repeats over lines takes 2^n steps to say no.
        parts = text.strip().split("\n") if self in _BY_LINE else (text.strip(),)
        compiled = _COMPILED[self]
        return all(not part or compiled.fullmatch(part.rstrip()) for part in parts)


_BY_LINE = frozenset({Form.RESOURCE, Form.FIELDS, Form.NODE_MEMINFO, Form.COUNTS})
_COMPILED = {form: re.compile(form.value, re.ASCII) for form in Form}


class PathRule(Struct, frozen=True):
    """Paths that are read: a glob of the shell, one component at a time.

    keep: where given, only lines that begin so are captured (the rest of /proc/self/status, say,
    is private).
    unless: a glob that says the same, better: this one is only read where that one matches nothing,
    as in trees of /sys from old kernels or packed by other programs.
    """

    glob: str
    kind: Kind
    form: Form
    why: str
    keep: tuple[str, ...] = ()
    unless: str | None = None


class ToolCommand(Struct, frozen=True):
    """A tool whose output is read.

    spellings: the argv, and others to try where the first program is not there.
    each: where given, its output is a list of words, and the tool runs once for each of them, the
    word as its last argument; the outputs stand one after the other in <wrapped> tags.
    """

    name: str
    spellings: tuple[tuple[str, ...], ...]
    why: str
    timeout_s: int = 30
    each: tuple[str, ...] = ()
    wrapped: str = ""


def _files(folder: str, form: Form, names: str, why: str) -> tuple[PathRule, ...]:
    return tuple(PathRule(f"{folder}/{name}", Kind.FILE, form, why) for name in names.split())


def _file(path: str, form: Form, why: str, keep: tuple[str, ...] = ()) -> PathRule:
    return PathRule(path, Kind.FILE, form, why, keep)


def _instead(folder: str, form: Form, names: str) -> tuple[PathRule, ...]:
    """Files of older kernels. names: "cpumap:cpulist" is one that stands for the other."""
    pairs = (pair.split(":") for pair in names.split())
    return tuple(
        PathRule(
            f"{folder}/{name}",
            Kind.FILE,
            form,
            f"as {of}, of older kernels",
            unless=f"{folder}/{of}",
        )
        for name, of in pairs
    )


def _link(path: str, form: Form, why: str) -> PathRule:
    return PathRule(path, Kind.LINK, form, why)


def _folder(path: str, why: str) -> PathRule:
    return PathRule(path, Kind.FOLDER, Form.NAME, why)


_SYSTEM = "/sys/devices/system"
_CPU = f"{_SYSTEM}/cpu/cpu[0-9]*"
_NODE = f"{_SYSTEM}/node/node[0-9]*"
_PCI = "/sys/bus/pci/devices/*"
_MDEV = "/sys/bus/mdev/devices"
_IRQ = "/proc/irq/[0-9]*"
_ACPI = "/sys/firmware/acpi/tables"
_EFFECTIVE = "cpuset.cpus.effective cpuset.mems.effective"
_VFIO = "/sys/module/vfio_iommu_type1/parameters"

_F = Form

BRIDGE_CLASS = "0x0604"
"""How the class of a PCI-to-PCI bridge begins, in its file; every PCIe port is one."""

PATHS: tuple[PathRule, ...] = (
    # CPUs
    *_files(
        f"{_SYSTEM}/cpu",
        _F.LIST,
        "online offline possible present isolated nohz_full",
        "which PUs there are, run, and are kept from the scheduler",
    ),
    *_files(f"{_SYSTEM}/cpu/smt", _F.WORD, "control active", "SMT switched on or off"),
    *_files(_CPU, _F.NUMBER, "online cpu_capacity", "offline PUs; kinds of core on arm64"),
    *_files(
        f"{_CPU}/topology",
        _F.NUMBER,
        "physical_package_id die_id cluster_id core_id",
        "package, die and core of a PU",
    ),
    *_files(
        f"{_CPU}/topology",
        _F.LIST,
        "core_cpus_list thread_siblings_list cluster_cpus_list die_cpus_list package_cpus_list "
        "core_siblings_list",
        "SMT siblings; PUs of a cluster, a die and a package",
    ),
    *_instead(
        f"{_CPU}/topology",
        _F.MASK,
        "core_cpus:core_cpus_list thread_siblings:thread_siblings_list "
        "core_siblings:core_siblings_list cluster_cpus:cluster_cpus_list",
    ),
    *_files(f"{_CPU}/cache/index[0-9]*", _F.NUMBER, "level", "which caches are last-level"),
    *_files(f"{_CPU}/cache/index[0-9]*", _F.WORD, "type", "instruction caches are left out"),
    *_files(f"{_CPU}/cache/index[0-9]*", _F.SIZE, "size", "size of the LLC"),
    *_files(f"{_CPU}/cache/index[0-9]*", _F.LIST, "shared_cpu_list", "PUs of an LLC"),
    *_instead(f"{_CPU}/cache/index[0-9]*", _F.MASK, "shared_cpu_map:shared_cpu_list"),
    _link(f"{_CPU}/cpufreq", _F.TO_POLICY, "the frequency policy of a PU"),
    *_files(
        f"{_CPU}/cpufreq",
        _F.NUMBER,
        "base_frequency cpuinfo_max_freq",
        "kinds of core where nothing else gives them",
    ),
    *_files(f"{_CPU}/cpufreq", _F.NUMBER, "scaling_max_freq", "a clock that is capped"),
    *_files(f"{_CPU}/cpufreq", _F.WORD, "scaling_governor scaling_driver", "slow by choice?"),
    *_files(f"{_CPU}/acpi_cppc", _F.NUMBER, "highest_perf", "kinds of core on AMD"),
    *_files("/sys/devices", _F.LIST, "cpu_core/cpus cpu_atom/cpus", "P and E cores of Intel"),
    *_files("/sys/devices", _F.LIST, "cpu_lowpower/cpus", "low-power E cores of Intel"),
    *_files(
        f"{_CPU}/cpuidle/state[0-9]*",
        _F.NUMBER,
        "latency disable",
        "how long a PU takes to wake up",
    ),
    *_files(f"{_SYSTEM}/cpu/intel_pstate", _F.NUMBER, "no_turbo", "turbo switched off"),
    *_files(f"{_SYSTEM}/cpu/cpufreq", _F.NUMBER, "boost", "boost switched off"),
    # NUMA nodes
    *_files(
        f"{_SYSTEM}/node",
        _F.LIST,
        "online possible has_cpu has_memory has_normal_memory has_generic_initiator",
        "nodes with and without CPUs, memory, GPUs as initiators",
    ),
    *_files(_NODE, _F.LIST, "cpulist", "PUs of a node"),
    *_instead(_NODE, _F.MASK, "cpumap:cpulist"),
    *_files(_NODE, _F.NUMBERS, "distance", "SLIT"),
    *_files(_NODE, _F.NODE_MEMINFO, "meminfo", "memory of a node, total and free"),
    *_files(
        f"{_NODE}/hugepages/hugepages-*kB",
        _F.NUMBER,
        "nr_hugepages free_hugepages surplus_hugepages",
        "huge pages of a node",
    ),
    *_files(
        f"{_NODE}/access[01]/initiators",
        _F.NUMBER,
        "read_latency write_latency read_bandwidth write_bandwidth",
        "HMAT: how fast the node is from its best initiators",
    ),
    _link(f"{_NODE}/access[01]/initiators/node[0-9]*", _F.TO_NODE, "HMAT: the best initiators"),
    _link("/sys/bus/dax/devices/*", _F.TO_DAX, "memory that is no ordinary node's: CXL, GPUs"),
    *_files("/sys/bus/dax/devices/*", _F.NUMBER, "target_node", "the node it became"),
    *(
        PathRule(f"{_ACPI}/{name}", Kind.TABLE, _F.NAME, f"{what}, as firmware gives it; root")
        for name, what in (("SRAT", "nodes"), ("SLIT", "their distances"))
    ),
    # Memory settings
    *_files(
        "/sys/kernel/mm/hugepages/hugepages-*kB",
        _F.NUMBER,
        "nr_hugepages free_hugepages",
        "huge pages of the host",
    ),
    *_files("/sys/kernel/mm/transparent_hugepage", _F.CHOICE, "enabled defrag", "THP"),
    *_files("/sys/kernel/mm/ksm", _F.NUMBER, "run", "KSM merges pages across nodes"),
    *_files("/proc/sys/kernel", _F.NUMBER, "numa_balancing", "moves pages behind our back"),
    *_files("/proc/sys/vm", _F.NUMBER, "zone_reclaim_mode", "reclaim before a remote node"),
    _file("/proc/meminfo", _F.FIELDS, "memory where there are no nodes"),
    # PCI
    _link(_PCI, _F.TO_DEVICE, "where a function hangs in the PCI tree"),
    *_files(
        _PCI,
        _F.HEX,
        "class vendor device revision subsystem_vendor subsystem_device",
        "what a function is",
    ),
    *_files(_PCI, _F.NUMBER, "numa_node", "locality; -1 is unknown"),
    *_files(_PCI, _F.LIST, "local_cpulist", "locality, in PUs"),
    *_instead(_PCI, _F.MASK, "local_cpus:local_cpulist"),
    *_files(_PCI, _F.SPEED, "current_link_speed max_link_speed", "slow links"),
    *_files(_PCI, _F.NUMBER, "current_link_width max_link_width", "narrow links"),
    *_files(f"{_PCI}/link", _F.NUMBER, "l0s_aspm l1_aspm", "links that sleep between transfers"),
    *_files(_PCI, _F.WORD, "power_state", "an idle device's link may be slow for that alone"),
    *_files(
        _PCI,
        _F.COUNTS,
        "aer_dev_correctable aer_dev_nonfatal aer_dev_fatal",
        "errors on links since the kernel started",
    ),
    *_files(_PCI, _F.NUMBER, "boot_vga", "the host's own console"),
    *_files(_PCI, _F.NUMBER, "sriov_totalvfs sriov_numvfs", "SR-IOV"),
    *_files(_PCI, _F.RESOURCE, "resource", "BAR sizes: apertures of the guest"),
    *_files(_PCI, _F.NUMBER, "secondary_bus_number subordinate_bus_number", "buses below a bridge"),
    _link(f"{_PCI}/driver", _F.TO_DRIVER, "who drives it"),
    _link(f"{_PCI}/iommu_group", _F.TO_GROUP, "with what it is isolated"),
    _link(f"{_PCI}/physfn", _F.TO_DEVICE, "the function that it is a virtual function of"),
    *_files(f"{_PCI}/nvidia", _F.NUMBER, "current_vgpu_type", "the vGPU of a virtual function"),
    *_files(f"{_PCI}/nvidia", _F.FIELDS, "creatable_vgpu_types", "names of vGPU types"),
    *_files(
        _PCI,
        _F.WORD,
        "current_compute_partition current_memory_partition",
        "how an AMD GPU is divided",
    ),
    _link("/sys/class/mdev_bus/*", _F.TO_DEVICE, "functions that mediated devices are made on"),
    _link(f"{_MDEV}/*", _F.TO_MEDIATED, "mediated devices: parts of a GPU"),
    _link(f"{_MDEV}/*/mdev_type", _F.TO_MEDIATED_TYPE, "their type"),
    *_files(f"{_MDEV}/*/mdev_type", _F.NAME, "name description", "their type's name and memory"),
    PathRule(f"{_PCI}/config", Kind.CONFIG, _F.NAME, "port type of a bridge; root reads it"),
    _folder(f"{_PCI}/infiniband/*", "NIC names as nvidia-smi gives them"),
    *_files("/sys/class/pci_bus/*", _F.LIST, "cpulistaffinity", "locality of a root complex"),
    _link("/sys/class/pci_bus/*", _F.TO_BUS, "the bus of a root complex"),
    _folder("/sys/class/iommu", "empty where no IOMMU is on"),
    _link("/sys/class/iommu/*", _F.TO_IOMMU, "whether an IOMMU is on"),
    *_files("/sys/kernel/iommu_groups/*", _F.WORD, "type", "translated, or passed through"),
    _file(f"{_VFIO}/dma_entry_limit", _F.NUMBER, "how many mappings a VM's devices may have"),
    # Interrupts
    _file(f"{_PCI}/msi_irqs/[0-9]*", _F.WORD, "the numbers of a function's interrupts"),
    _file(f"{_IRQ}/effective_affinity_list", _F.LIST, "the PUs that handle them"),
    *_instead(_IRQ, _F.LIST, "smp_affinity_list:effective_affinity_list"),
    *(
        _folder(f"/sys/fs/cgroup/{way}", "whether irqbalance runs")
        for way in ("system.slice/irqbalance.service", "systemd/system.slice/irqbalance.service")
    ),
    # The system
    *_files("/sys/devices/virtual/dmi/id", _F.NAME, "product_name sys_vendor", "which machine"),
    *_files(
        "/sys/devices/virtual/dmi/id",
        _F.NAME,
        "bios_vendor bios_version bios_date",
        "whether the firmware is another one",
    ),
    _file("/proc/device-tree/model", _F.NAME, "which machine, on arm64"),
    *_files("/sys/hypervisor", _F.WORD, "type", "Xen"),
    *_files("/proc/sys/kernel", _F.NAME, "osrelease", "the kernel"),
    *_files("/proc/sys/kernel", _F.WORD, "arch", "the architecture"),
    PathRule(
        "/proc/version", Kind.FILE, _F.NAME, "the kernel", unless="/proc/sys/kernel/osrelease"
    ),
    PathRule(
        "/proc/hwloc-nofile-info",  # hwloc-gather-topology writes it into its trees
        Kind.FILE,
        _F.FIELDS,
        "the architecture",
        ("Architecture", "OSRelease"),
        unless="/proc/sys/kernel/osrelease",
    ),
    _file("/proc/cmdline", _F.COMMAND_LINE, "isolcpus, nohz_full, hugepages, iommu and the like"),
    _file(
        "/proc/cpuinfo",
        _F.FIELDS,
        "CPU model",
        (
            "processor",
            "vendor_id",
            "cpu family",
            "model",  # also "model name"
            "stepping",
            "microcode",
            "flags",
            "CPU ",  # arm64: CPU implementer, architecture, variant, part, revision
            "Features",
            "cpu\t",  # ppc64
        ),
    ),
    _file(
        "/proc/self/status",
        _F.FIELDS,
        "PUs and nodes that the cgroup allows",
        ("Cpus_allowed", "Mems_allowed"),
    ),
    *_files("/sys/fs/cgroup", _F.LIST, _EFFECTIVE, "PUs and nodes that the cgroup allows"),
    *_files(
        "/sys/fs/cgroup/cpuset",  # version 1
        _F.LIST,
        "cpuset.cpus cpuset.effective_cpus cpuset.mems cpuset.effective_mems",
        "PUs and nodes that the cgroup allows",
    ),
    *_files("/sys/fs/cgroup/machine.slice", _F.LIST, _EFFECTIVE, "what libvirt's machines may use"),
    _file("/proc/driver/nvidia/gpus/*/numa_status", _F.FIELDS, "the node of a GPU's memory"),
    _file(
        "/proc/driver/nvidia/gpus/*/information",
        _F.FIELDS,
        "model of a GPU",
        ("Model", "Bus Location", "Bus Type", "Device Minor"),
    ),
)


def _rocm(program: str, *arguments: str) -> tuple[tuple[str, ...], ...]:
    """Spellings of a tool of ROCm, whose folder is often not in the search path."""
    return (program, *arguments), (f"/opt/rocm/bin/{program}", *arguments)


# The read-only connection: a capture must not be able to change a host.
_VIRSH = ("virsh", "-q", "-r", "-c", "qemu:///system")

COMMANDS: tuple[ToolCommand, ...] = (
    ToolCommand(
        "lspci",
        (("lspci", "-D", "-nn", "-vvv"), ("/usr/sbin/lspci", "-D", "-nn", "-vvv")),
        "names, port types, links' capabilities, slots",
        60,
    ),
    ToolCommand("nvidia-smi-query", (("nvidia-smi", "-q", "-x"),), "GPUs, C2C, PCIe links", 60),
    ToolCommand("nvidia-smi-topo", (("nvidia-smi", "topo", "-m"),), "NVLink, GPU memory nodes", 60),
    ToolCommand("nvidia-smi-list", (("nvidia-smi", "-L"),), "MIG instances: profiles, UUIDs", 60),
    ToolCommand("nvidia-smi-mig", (("nvidia-smi", "mig", "-lgi"),), "MIG instances: numbers", 60),
    ToolCommand("rocm-smi-topo", _rocm("rocm-smi", "--showtopo"), "xGMI links", 60),
    ToolCommand(
        "rocm-smi-json",
        _rocm("rocm-smi", "--showbus", "--showtopo", "--json"),
        "xGMI links, by addresses",
        60,
    ),
    ToolCommand("amd-smi-topology", _rocm("amd-smi", "topology", "--json"), "xGMI links", 60),
    ToolCommand(
        "amd-smi-partition",
        _rocm("amd-smi", "partition", "--current", "--json"),
        "how AMD GPUs are divided",
        60,
    ),
    ToolCommand("virsh-capabilities", ((*_VIRSH, "capabilities"),), "cross-check of nodes and PUs"),
    ToolCommand(
        "virsh-domains",
        # UUIDs, not names: a domain may be named "--help".
        ((*_VIRSH, "dumpxml"),),
        "PUs, memory and devices that other VMs use",
        each=(*_VIRSH, "list", "--all", "--uuid"),
        wrapped="domains",
    ),
    ToolCommand("virsh-version", ((*_VIRSH, "version"),), "libvirt's version: what it accepts"),
    ToolCommand(
        "qemu-version",
        (
            ("qemu-system-x86_64", "--version"),
            ("qemu-system-aarch64", "--version"),
            ("qemu-kvm", "--version"),
            ("/usr/libexec/qemu-kvm", "--version"),
        ),
        "QEMU's version: what it accepts",
    ),
    # Not "uname -a": the host's name is private.
    ToolCommand("uname", (("uname", "-s", "-r", "-v", "-m"),), "kernel and architecture"),
)

COMMAND_OF_NAME = {command.name: command for command in COMMANDS}

IDENTITY_PATHS = (
    "/proc/sys/kernel/hostname",
    "/proc/sys/kernel/domainname",
    "/etc/hostname",
    "/etc/machine-id",
)
"""Read so that their words can be found and redacted elsewhere. Never stored."""

SERIAL_PATHS = tuple(
    f"/sys/devices/virtual/dmi/id/{name}"
    for name in ("product_serial", "board_serial", "chassis_serial", "chassis_asset_tag")
)
"""As IDENTITY_PATHS: each is one text, that only root may read."""

IDENTITY_COMMANDS = (ToolCommand("user", (("id", "-un"),), "whose name to redact", 10),)
"""As IDENTITY_PATHS."""
