"""Order: where libvirt itself puts elements, for those that a document does not have yet."""

DOMAIN_ORDER = tuple(
    """
    name uuid hwuuid genid title description metadata maxMemory memory currentMemory
    blkiotune memtune memoryBacking vcpu vcpus iothreads iothreadids defaultiothread cputune
    numatune iommufd resource sysinfo bootloader bootloader_args os idmap features cpu clock
    on_poweroff on_reboot on_crash on_lockfailure pm perf devices seclabel keywrap
    launchSecurity
""".split()
)
"""Children of <domain>. Source: virDomainDefFormatInternalSetRootName, libvirt 9.0, 12.2."""

CPU_ORDER = ("model", "vendor", "maxphysaddr", "topology", "cache", "feature", "numa")
"""Children of <cpu>. Source: virCPUDefFormatBuf and virDomainNumaDefFormatXML, libvirt 9.0."""

MEMORY_BACKING_ORDER = (
    "hugepages",
    "nosharepages",
    "locked",
    "source",
    "access",
    "allocation",
    "discard",
)

FEATURES_ORDER = ("acpi", "apic", "pae", "hap", "viridian", "hyperv", "kvm", "pvspinlock", "ioapic")

DEVICES_ORDER = ("emulator", "disk", "filesystem", "controller", "lease", "smartcard", "serial")
"""The first children of <devices>: a controller goes behind the disks."""
