"""MessagesPassthrough: what QEMU, VFIO and Proxmox print when a device cannot be passed to a VM."""

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
        amd_ & failed to reset device
        no available reset mechanism
        pci_irq_handler: assertion
        completion-wait loop timed out
        iotlb_inv_timeout
        after flr; waiting
        reset bug
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
        "device-of-no-host",
        Sure.CERTAIN,
        """
        no pci device info for device
        not found: could not access
        failed to read & vendor: no such file
        pci device & doesn't exist
        no such pci device
        hostdev pci & not found
        """,
    ),
    Message(
        "pcie-needs-q35",
        Sure.CERTAIN,
        """
        q35 machine model is not enabled
        pcie & requires q35
        pcie=1 & q35
        """,
    ),
    Message(
        "vm-device-unassigned",
        Sure.LIKELY,
        """
        pci_resource_ & not found
        failed to create gpu host-devices
        failed to create hostdevice
        no pci address & env
        pci_resource_ & environment
        """,
    ),
    Message(
        "vgpu-unlicensed",
        Sure.CERTAIN,
        """
        unlicensed (restricted)
        license status & unlicensed
        failed to acquire license from
        """,
    ),
    Message(
        "host-driver-in-use",
        Sure.LIKELY,
        """
        non-zero usage count
        module nvidia is in use
        module amdgpu is in use
        module nvidia_drm is in use
        nvidia_modeset is in use
        still in use & nvidia
        """,
    ),
    Message(
        "vfio-probe-failed",
        Sure.LIKELY,
        """
        vfio-pci: probe of & failed
        vfio-pci & probe with driver vfio-pci failed
        failed to bind & vfio-pci
        unable to bind & vfio-pci
        write error: no such device & vfio
        """,
    ),
    Message(
        "display-without-opengl",
        Sure.CERTAIN,
        """
        opengl not available
        egl: no drm render node
        vfio-display-dmabuf
        """,
    ),
)
