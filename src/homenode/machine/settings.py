"""HostSettings: settings of a host's running system; its topology is in topology.py."""

from msgspec import Struct

from homenode.cpuset import CpuSet


class FrequencyLimit(Struct, frozen=True):
    """The highest clocks that the policy and the hardware of online CPUs allow, in kHz."""

    limit_khz: int
    hardware_khz: int | None  # None if it is not given
    pus: CpuSet


_PLACEMENT_PARAMETERS = frozenset(
    """
    amd_iommu amd_pstate default_hugepagesz hugepages hugepagesz intel_idle.max_cstate intel_iommu
    intel_pstate iommu irqaffinity isolcpus maxcpus mem memmap mitigations nohz_full nosmt nr_cpus
    numa numa_balancing pci pcie_acs_override pcie_aspm processor.max_cstate rcu_nocbs
    transparent_hugepage vfio-pci.ids vfio_iommu_type1.dma_entry_limit
    """.split()
)


class HostSettings(Struct, frozen=True):
    """Settings of the running system; None if the source does not report it."""

    kernel_release: str | None = None
    kernel_command_line: str | None = None
    # /sys/devices/system/cpu/smt/control ("on", "off", "forceoff", "notsupported")
    smt_control: str | None = None
    transparent_hugepages: str | None = None
    numa_balancing: int | None = None  # kernel.numa_balancing
    libvirt_version: tuple[int, int, int] | None = None  # (major, minor, micro)
    qemu_version: tuple[int, int, int] | None = None  # (major, minor, micro)
    scaling_drivers: tuple[str, ...] | None = None  # cpufreq drivers in use, sorted
    ksm_run: int | None = None  # 1 where KSM merges pages
    iommus: tuple[str, ...] | None = None  # names of the IOMMUs that are on, () = none
    # pus_of_governor, pus_of_idle_latency_us: the online CPUs that have each governor, and each
    # latency of their deepest enabled idle state; ascending
    pus_of_governor: tuple[tuple[str, CpuSet], ...] | None = None
    pus_of_idle_latency_us: tuple[tuple[int, CpuSet], ...] | None = None
    irqbalance: bool | None = None  # True if its service runs
    # mappings that VFIO allows a VM; None if its module is not loaded
    dma_entry_limit: int | None = None
    frequency_limits: tuple[FrequencyLimit, ...] | None = None
    firmware: str | None = None  # its vendor, version and date
    turbo: str | None = None  # "on" or "off"

    @property
    def governors(self) -> tuple[str, ...] | None:
        """cpufreq governors in use, sorted."""
        pus_of_governor = self.pus_of_governor
        return None if pus_of_governor is None else tuple(name for name, _ in pus_of_governor)

    @property
    def placement_parameters(self) -> str | None:
        """Kernel parameters that affect placement and speed of VMs; others may name disks or
        passwords. None if the command line is not known."""
        if self.kernel_command_line is None:
            return None
        words = self.kernel_command_line.split()
        return " ".join(w for w in words if w.partition("=")[0] in _PLACEMENT_PARAMETERS)
