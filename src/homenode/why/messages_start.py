"""MessagesStart: what QEMU, libvirt and Proxmox print when a VM does not start."""

from homenode.why.message import Message, Sure

ROWS = (
    Message(
        "binding-forbidden",
        Sure.CERTAIN,
        """
        cannot bind memory to host numa nodes: operation not permitted
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
        cannot bind memory to host numa nodes: invalid argument
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
    Message(
        "topology-product",
        Sure.CERTAIN,
        """
        topology doesn't match maximum vcpu count
        topology doesn't match the desired vcpu count
        product of the hierarchy must
        invalid cpu topology
        cpu topology: sockets
        """,
    ),
    Message(
        "memory-sum",
        Sure.CERTAIN,
        """
        total memory for numa nodes
        """,
    ),
    Message(
        "vcpu-in-no-cell",
        Sure.CERTAIN,
        """
        cpu(s) not present in any numa nodes
        """,
    ),
    Message(
        "cell-of-no-vcpu",
        Sure.CERTAIN,
        """
        cpu ids in <numa> exceed the <vcpu> count
        cpu ids in numa exceed
        """,
    ),
    Message(
        "chassis-twice",
        Sure.CERTAIN,
        """
        can't add chassis slot
        chassis & already in use
        """,
    ),
    Message(
        "cells-needed",
        Sure.CERTAIN,
        """
        per-node memory binding is not supported
        per-node binding is not
        memnode & requires
        numa node tuning & without
        """,
    ),
    Message(
        "start-slow",
        Sure.LIKELY,
        """
        timed out waiting for domain
        failed: got timeout
        start failed & timeout
        timed out waiting for & qemu
        start-timeout
        failed to become ready & qemu & timeout
        """,
    ),
    Message(
        "vm-cpus-short",
        Sure.LIKELY,
        """
        could not fit & vcpus into
        not enough exclusive threads
        no more cpus available in the pool
        not enough cpus & pinning
        """,
    ),
    Message(
        "ovirt-numa-no-fit",
        Sure.CERTAIN,
        """
        did not satisfy internal filter numa
        """,
    ),
    Message(
        "saved-state-refused",
        Sure.LIKELY,
        """
        load of migration failed
        error while loading state for instance
        bad config data: i=
        """,
    ),
    Message(
        "qemu-too-old",
        Sure.CERTAIN,
        """
        is not supported by this qemu binary
        not supported with this qemu binary
        unsupported machine type
        is not a valid device model name
        unknown machine type
        does not support machine type
        unsupported configuration: this qemu
        """,
    ),
    Message(
        "start-error-unnamed",
        Sure.NOT_ENOUGH,
        """
        qemu exited with code
        process exited while connecting to monitor
        unexpectedly closed the monitor
        libvirtd quit during handshake
        end of file while reading data: input/output error
        """,
    ),
)
