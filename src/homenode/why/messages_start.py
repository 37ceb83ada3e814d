"""MessagesStart: what QEMU, libvirt, VFIO and Proxmox print when a VM does not start."""

from homenode.why.message import Message, Sure

ROWS = (
    Message(
        "iommu-group-shared",
        Sure.CERTAIN,
        """
        is not viable
        please ensure all devices within the iommu_group are bound
        """,
    ),
    Message(
        "iommu-off",
        Sure.CERTAIN,
        """
        iommu not present
        no iommu detected
        no iommu_group for device
        no iommu found
        host doesn't support passthrough of host pci devices
        host doesn't support vfio pci passthrough
        vfio: no iommu group
        no iommu group found
        iommu is not enabled
        support vfio & iommu & disabled
        no dmar devices found
        """,
    ),
    Message(
        "vfio-interrupts-unsafe",
        Sure.CERTAIN,
        """
        no interrupt remapping support
        no interrupt remapping for
        allow_unsafe_interrupts
        """,
    ),
    Message(
        "device-rmrr",
        Sure.CERTAIN,
        """
        platform rmrr requirement
        device is ineligible for iommu domain attach
        """,
    ),
    Message(
        "vfio-bar-held",
        Sure.CERTAIN,
        """
        can't reserve [mem
        cannot reserve [mem
        failed to mmap & bar
        failed to map bar
        vfio_bar_restore: reset recovery
        failed to mmap & resource
        """,
    ),
    Message(
        "vfio-no-group-file",
        Sure.LIKELY,
        """
        failed to open /dev/vfio/
        could not open '/dev/vfio/ & no such file
        /dev/vfio/ & no such file or directory
        is not bound to vfio
        unmanaged pci device
        not bound to vfio-pci
        verify all devices in group
        """,
    ),
    Message(
        "vfio-permission",
        Sure.LIKELY,
        """
        /dev/vfio/ & permission denied
        /dev/vfio/ & operation not permitted
        failed to set iommu for container: operation not permitted
        """,
    ),
    Message(
        "device-in-use",
        Sure.CERTAIN,
        """
        is in use by driver qemu
        already in use by domain
        is already in use by other
        pci device & already in use by vmid
        pci device & is in use by
        """,
    ),
    Message(
        "vfio-busy",
        Sure.LIKELY,
        """
        could not open '/dev/vfio/ & device or resource busy
        failed to open /dev/vfio/ & busy
        vfio & device or resource busy
        error getting device from group
        """,
    ),
    Message(
        "vfio-memory-lock",
        Sure.CERTAIN,
        """
        vfio_map_dma failed: cannot allocate memory
        vfio_map_dma & cannot allocate memory
        vfio_dma_map( & (cannot allocate memory)
        vfio_container_dma_map( & (cannot allocate memory)
        cannot limit locked memory of process
        vfiodmamap & cannot allocate memory
        vfiodmamap & os error 12
        dmamap & os error 12
        rlimit_memlock
        vfio_pin_pages_remote: rlimit
        rlimit (memlock) exceeded
        mlockall & cannot allocate memory
        mlock: cannot allocate memory
        realtime: failed to lock
        vfio_pin_map_dma & cannot allocate memory
        """,
    ),
    Message(
        "dma-map-limit",
        Sure.CERTAIN,
        """
        vfio_map_dma & no space left on device
        vfio_dma_map( & (no space left on device)
        vfio_container_dma_map( & (no space left on device)
        dma_entry_limit
        """,
    ),
    Message(
        "vfio-address-refused",
        Sure.LIKELY,
        """
        vfio_map_dma & invalid argument
        vfio_dma_map( & (invalid argument)
        vfio_container_dma_map( & (invalid argument)
        vfio_map_dma & file exists
        vfio_dma_map( & (file exists)
        iommu address width & exceed
        exceeds the iommu
        iova range
        """,
    ),
    Message(
        "vfio-bar-not-mapped-for-dma",
        Sure.LIKELY,
        """
        vfio_map_dma & bad address
        vfio_dma_map( & (bad address)
        vfio_container_dma_map( & (bad address)
        -14 (bad address)
        """,
    ),
    Message(
        "device-does-not-reset",
        Sure.CERTAIN,
        """
        not ready & after flr
        not ready & after bus reset
        giving up & after flr
        unknown pci header type '127'
        unknown header type 7f
        invalid pci header type
        unable to change power state from d3cold to d0
        unable to power on device, stuck in d3
        refused to change power state, currently in d3
        timed out waiting for pending transaction
        stuck in d3
        config space inaccessible; aborting
        failed to return from flr
        reset failed & vfio
        """,
    ),
    Message(
        "gpu-code-43",
        Sure.LIKELY,
        r"""
        code 43 ~ \bcode:? 43\b
        error 43 ~ \berror 43\b
        """,
    ),
    Message(
        "gpu-rom-missing",
        Sure.LIKELY,
        """
        invalid pci rom header signature
        device option rom contents are probably invalid
        failed to load option rom
        cannot read device rom
        """,
    ),
    Message(
        "cpu-not-of-host",
        Sure.CERTAIN,
        """
        host doesn't support requested feature
        guest cpu doesn't match specification
        cpu is incompatible with host cpu
        guest and host cpu are not compatible
        host cpu does not provide required features
        is not supported by the hypervisor & cpu
        doesn't support requested features
        this feature depends on & cpuid
        """,
    ),
    Message(
        "kvm-missing",
        Sure.CERTAIN,
        """
        could not access kvm kernel module
        failed to initialize kvm
        kvm: disabled by bios
        no accelerator found
        kvm virtualisation configured, but not available
        kvm & not supported by this host
        virtualization disabled & bios
        vmx not & outside txt
        kvm: no hardware support
        kvm acceleration not available
        domain requires kvm, but it is not available
        svm disabled & bios
        """,
    ),
    Message(
        "vcpus-above-hypervisor",
        Sure.CERTAIN,
        """
        invalid smp cpus
        number of smp cpus requested
        exceeds max cpus supported
        exceeds the maximum cpus supported
        vcpus & greater than the maximum
        maxvcpus must not
        requires eim
        more than 255 vcpus
        vcpus require extended interrupt mode
        kvm_init_vcpu
        cpus & exceeds the recommended cpus supported by kvm
        number of hotpluggable cpus requested
        requires & vcpus & irqchip=split
        """,
    ),
    Message(
        "huge-pages-short",
        Sure.CERTAIN,
        """
        unable to map backing store for guest ram
        insufficient free host memory pages available
        hugepage allocation failed
        hugepages & cannot allocate memory
        preallocating memory failed
        os_mem_prealloc
        qemu_prealloc_mem
        no free & kb hugepages
        no free & hugepages reported
        unable to map & hugetlb
        hugetlbfs & no space
        start failed: hugepage
        hugepage & allocation failed
        not enough free hugepages
        failed to allocate & hugepages
        touch_pages & bus error
        """,
    ),
    Message(
        "hugetlbfs-missing",
        Sure.CERTAIN,
        """
        unable to find any usable hugetlbfs mount
        hugetlbfs filesystem is not mounted
        can't open backing store & hugepages
        hugepages & permission denied
        no hugetlbfs mount
        hugepages not supported
        no mounted hugetlbfs
        page size & not available on this host & huge
        """,
    ),
    Message(
        "memory-of-no-node",
        Sure.CERTAIN,
        """
        cannot bind memory to host numa nodes
        numa node & is out of range
        numa node & is unavailable
        numa node set & not available
        unable to set numa memory policy
        numa node & doesn't exist
        mbind & invalid argument
        host numa node & unavailable
        """,
    ),
    Message(
        "host-memory-short",
        Sure.LIKELY,
        """
        cannot set up guest memory
        killed process & qemu
        killed process & kvm
        out of memory: killed process & cloud-hyper
        oom-kill & qemu
        oom-kill & libvirt
        cannot allocate memory & pc.ram
        start failed & out of memory
        not enough free memory
        """,
    ),
    Message(
        "pin-of-no-pu",
        Sure.CERTAIN,
        """
        cannot set cpu affinity on process
        unable to set affinity
        sched_setaffinity & invalid argument
        failed to set affinity
        taskset: failed to set
        cpuset.cpus & numerical result out of range
        vcpupin & exceeds
        """,
    ),
    Message(
        "cpuset-refused",
        Sure.LIKELY,
        """
        cpuset.cpus & invalid argument
        cpuset.mems & invalid argument
        cpuset.cpus & permission denied
        cpuset.mems & permission denied
        invalid value & cpuset.mems
        invalid value & cpuset.cpus
        cpuset & no space left on device
        """,
    ),
    Message(
        "pci-ports-short",
        Sure.CERTAIN,
        """
        no more available pci slots
        no more available pci addresses
        no slot/function available
        pci: slot & not available for
        no free hotpluggable pci
        no pci buses available
        too many pci devices
        in use by & pci: slot
        not enough free pci slots
        """,
    ),
    Message(
        "memory-plug-without-cells",
        Sure.CERTAIN,
        """
        at least one numa node has to be configured
        memory hotplug requires numa
        memory hotplug needs numa
        numa needs to be enabled for memory hotplug
        hotplug & numa & must be enabled
        dimm & numa is not
        memory hotplug & without numa
        """,
    ),
    Message(
        "address-bits-small",
        Sure.CERTAIN,
        """
        phys-bits too low
        address space limit & phys-bits
        phys-bits & should be between
        host-phys-bits & limit
        """,
    ),
    Message(
        "topoext-missing",
        Sure.CERTAIN,
        """
        doesn't support hyperthreading
        """,
    ),
    Message(
        "migration-with-passthrough",
        Sure.CERTAIN,
        """
        vfio migration is not supported
        cannot migrate domain with assigned host
        cannot migrate & host device
        blocked by non-migratable device
        non-migratable device
        can't migrate vm which uses local devices
        can't migrate running vm & passthrough
        hostpci & cannot live-migrate
        live migration & pci & not supported
        cannot be live migrated & hostdevice
        hostdevicenotlivemigratable
        cannot migrate vm with & passthrough
        """,
    ),
    Message(
        "vgpu-not-started",
        Sure.LIKELY,
        """
        mdev & not found
        vgpu & failed to start
        nvidia-vgpu-mgr & error
        vmiop_log: & error
        available_instances & no such
        mdev_create & no space left on device
        failed to get vgpu
        vgpu type & not supported
        no available mdev
        vfio_mdev & input/output error
        unable to find & mdev type
        """,
    ),
    Message(
        "numad-missing",
        Sure.CERTAIN,
        """
        failed to query numad
        """,
    ),
    Message(
        "firmware-files-missing",
        Sure.LIKELY,
        """
        could not load pc bios
        unable to find any firmware to satisfy
        could not find & ovmf
        operation failed: unable to find & efi
        failed to open & ovmf_vars
        """,
    ),
    Message(
        "switches-not-alone",
        Sure.LIKELY,
        """
        pxb-pcie & not supported
        pcie expander bus & only
        pcie-expander-bus & machine
        pci expander & q
        """,
    ),
)
