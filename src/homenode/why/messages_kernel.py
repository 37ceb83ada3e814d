"""MessagesKernel: lines of dmesg and of GPU drivers, of host and guest."""

from homenode.why.message import Message, Sure

ROWS = (
    Message(
        "driver-not-for-gpu",
        Sure.CERTAIN,
        """
        installed in this system is not supported by the
        """,
    ),
    Message(
        "gpu-off-the-bus",
        Sure.CERTAIN,
        """
        has fallen off the bus
        xid & : 79
        gpu is lost
        """,
    ),
    Message(
        "gpu-memory-errors",
        Sure.CERTAIN,
        """
        xid & : 48,
        xid & : 63,
        xid & : 64,
        xid & : 94,
        xid & : 95,
        double bit ecc
        uncorrectable ecc error encountered
        row remapper
        row remapping failure
        """,
    ),
    Message(
        "gpu-nvlink-errors",
        Sure.CERTAIN,
        """
        xid & : 74,
        xid & : 144,
        xid & : 145,
        xid & : 149,
        sxid & , fatal
        """,
    ),
    Message(
        "gpu-firmware-stopped",
        Sure.CERTAIN,
        """
        xid & : 119,
        xid & : 120,
        xid & : 61,
        xid & : 62,
        timeout & waiting for rpc from gsp
        timeout waiting for rpc from gsp
        """,
    ),
    Message(
        "gpu-power-cable",
        Sure.CERTAIN,
        """
        xid & : 54,
        auxiliary power is not connected
        power cable
        """,
    ),
    Message(
        "gpu-program-fault",
        Sure.LIKELY,
        """
        xid & : 13,
        xid & : 31,
        xid & : 43,
        xid & : 45,
        xid & : 68,
        xid & : 69,
        """,
    ),
    Message(
        "pcie-errors-uncorrected",
        Sure.CERTAIN,
        """
        pcie bus error: severity=uncorrect
        pcieport & severity=uncorrected
        aer: uncorrect
        """,
    ),
    Message(
        "pcie-errors-corrected",
        Sure.LIKELY,
        """
        pcie bus error: severity=correct
        aer: corrected error
        aer: multiple corrected
        """,
    ),
    Message(
        "pci-bar-unplaced",
        Sure.CERTAIN,
        r"""
        failed allocating new mmio range
        failed moving device bar
        no space for [mem ~ bar [0-5]: no space for \[mem
        failed to assign [mem ~ bar [0-5]: failed to assign \[mem
        can't assign; no space ~ bar [0-5] \[mem
        can't assign mem ~ bar [0-5]: can't assign mem
        pci i/o region assigned to your nvidia device is invalid
        is 0m @ 0x0
        """,
    ),
    Message(
        "sriov-no-space",
        Sure.CERTAIN,
        """
        not enough mmio resources for sr-iov
        sr-iov: bus number out of range
        can't enable & vfs & bus
        vf bar & no space
        sriov & not enough bus
        """,
    ),
    Message(
        "vf-limit",
        Sure.LIKELY,
        """
        sriov_numvfs & numerical result out of range
        sriov_numvfs & result too large
        sriov_numvfs & device or resource busy
        sriov_numvfs & cannot allocate memory
        sriov_numvfs & function not implemented
        vfs requested & only & available
        requested & vfs & exceed
        sriov_numvfs & no such file
        """,
    ),
    Message(
        "iommu-fault",
        Sure.LIKELY,
        """
        io_page_fault
        dmar: [dma read
        dmar: [dma write
        dmar: [dma
        dmar: drhd: handling fault status
        smmu & translation fault
        arm-smmu & event 0x
        """,
    ),
    Message(
        "pcie-link-limited",
        Sure.POSSIBLE,
        """
        available pcie bandwidth, limited by
        """,
    ),
    Message(
        "driver-init-failed",
        Sure.LIKELY,
        """
        rminitadapter failed
        nvidia probe routine failed
        the nvidia probe routine was not called
        unable to determine the device handle
        no devices were found
        amdgpu & fatal error during gpu init
        amdgpu: probe of & failed
        failed to initialize the gpu
        nvrm: failed to enable msi
        no nvidia gpu found
        nvrm: gpu & could not be initialized
        """,
    ),
    Message(
        "driver-open-needed",
        Sure.CERTAIN,
        """
        requires use of the nvidia open kernel modules
        open kernel modules & required
        not supported by proprietary nvidia.ko
        """,
    ),
    Message(
        "driver-versions-differ",
        Sure.CERTAIN,
        """
        driver/library version mismatch
        nvml/driver version mismatch
        api mismatch: the client has the version
        api mismatch & kernel module
        """,
    ),
    Message(
        "fabric-manager-missing",
        Sure.CERTAIN,
        """
        system not yet initialized
        cudaerrorsystemnotready
        cuda_error_system_not_ready
        fabric manager is not running
        cuda failure 802
        error 802
        error_system_not_ready
        """,
    ),
    Message(
        "fabric-manager-differs",
        Sure.CERTAIN,
        """
        fabric manager & version & mismatch
        fabric manager & driver version
        detected driver & fabric manager & version
        """,
    ),
    Message(
        "nvlink-inactive",
        Sure.POSSIBLE,
        """
        link & : <inactive>
        nvlink & inactive
        nvlink: fabric & not started
        fabric state & in progress
        """,
    ),
    Message(
        "numa-node-negative",
        Sure.CERTAIN,
        """
        numa_node: -1
        numa node: -1
        numa_node=-1
        numa_node = -1
        had negative value (-1), but there must be at least one numa node
        could not read numa node
        """,
    ),
    Message(
        "nodes-not-shown",
        Sure.LIKELY,
        """
        no numa configuration found
        faking a node at
        numa turned off
        no numa support available
        srat: srat not used
        """,
    ),
    Message(
        "guest-kernel-warning",
        Sure.LIKELY,
        """
        llc-sibling cpu & is not on the same node
        topology_sane
        cpu topology & broken
        bios bug: apic id mismatch
        apic id mismatch
        """,
    ),
    Message(
        "guest-stalls",
        Sure.LIKELY,
        """
        soft lockup - cpu
        self-detected stall
        clocksource & 'tsc' as unstable
        marking clocksource 'tsc'
        hrtimer: interrupt took
        rcu: info: rcu & stall
        """,
    ),
    Message(
        "pcie-slot-down",
        Sure.LIKELY,
        """
        pciehp: slot & link down
        slot(&): link down
        card not present & pciehp
        broken device, retraining non-functional downstream link
        """,
    ),
    Message(
        "peermem-missing",
        Sure.CERTAIN,
        """
        nvidia_peermem & disagrees
        could not insert 'nvidia_peermem'
        nvidia-peermem & invalid argument
        module nvidia_peermem not found
        nv_peer_mem & not found
        nv_peer_mem & unknown symbol
        nvidia_peermem: unknown symbol
        nvidia_peermem & could not be loaded
        """,
    ),
    Message(
        "gpu-container-lost",
        Sure.LIKELY,
        """
        failed to initialize nvml: unknown error
        """,
    ),
    Message(
        "iommu-not-passthrough",
        Sure.CERTAIN,
        """
        missing "iommu=pt" from kernel command line
        missing 'iommu=pt'
        """,
    ),
    Message(
        "p2p-redirected",
        Sure.LIKELY,
        """
        acsctl: & reqredir+
        nccl warn & acs & enabled
        acs is enabled
        """,
    ),
    Message(
        "iommu-invalidation-timeout",
        Sure.LIKELY,
        """
        invalidation time-out error
        qi: invalidation time
        dmar: qi & timeout
        drhd: handling fault status reg 40
        """,
    ),
    Message(
        "nic-firmware-down",
        Sure.CERTAIN,
        """
        pre-initializing state, aborting
        mlx5_core & firmware over
        enable hca failed
        mlx5_core & fw fatal
        health & device has encountered & error
        mlx5_core & poll_health & device
        """,
    ),
    Message(
        "numa-calls-forbidden",
        Sure.CERTAIN,
        """
        failed to bind memory
        unable to bind memory
        memory binding & not permitted
        set_mempolicy: operation not permitted
        mbind: operation not permitted
        set_mempolicy & operation not permitted
        get_mempolicy: operation not permitted
        migrate_pages & operation not permitted
        mbind & operation not permitted
        move_pages & operation not permitted
        failed to set mempolicy
        """,
    ),
    Message(
        "cpuset-narrow",
        Sure.LIKELY,
        """
        libnuma: warning: & out of range
        libnuma: warning: & not in
        numactl & is invalid
        libnuma: warning: cpu argument
        libnuma: warning: node argument
        """,
    ),
    Message(
        "vf-without-guid",
        Sure.LIKELY,
        """
        node_guid: & 0000:0000:0000:0000
        """,
    ),
    Message(
        "sriov-interrupts-short",
        Sure.CERTAIN,
        """
        msi-x interrupts available for sr-iov
        minimum of & msi-x interrupts per vf
        not enough msi-x
        """,
    ),
    Message(
        "vf-setting-refused",
        Sure.LIKELY,
        """
        failed to set vf & operation not supported
        failed to configure vf
        vf & rtnetlink answers: operation not supported
        set vf & link state & not supported
        """,
    ),
    Message(
        "hwloc-contradiction",
        Sure.LIKELY,
        """
        invalid information from the operating system
        looks like an error from the operating system
        intersects with numanode
        intersects with & without inclusion
        """,
    ),
)
