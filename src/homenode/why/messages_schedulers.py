"""MessagesSchedulers: what kubelet, KubeVirt, Nova and Slurm print when they refuse something."""

from homenode.why.message import Message, Sure

ROWS = (
    Message(
        "pod-refused",
        Sure.CERTAIN,
        """
        numa & cannot be aligned
        insufficient free resources on & numa
        cannot align container
        cannot align pod
        topologyaffinityerror
        topology affinity error
        resources cannot be allocated with topology locality
        numa topology & resources cannot be allocated
        unexpectedadmissionerror & memorymanager
        """,
    ),
    Message(
        "smt-alignment",
        Sure.CERTAIN,
        """
        smtalignmenterror
        smt alignment error
        not multiple cpus per core
        """,
    ),
    Message(
        "device-plugin-unhealthy",
        Sure.CERTAIN,
        """
        allocate failed due to requested number of devices unavailable
        no healthy devices present
        cannot allocate unhealthy devices
        unexpectedadmissionerror & allocate failed
        device plugin & unhealthy
        requested number of devices unavailable
        """,
    ),
    Message(
        "pod-pending",
        Sure.LIKELY,
        """
        insufficient nvidia.com
        insufficient amd.com
        insufficient hugepages
        insufficient cpu & nodes are available
        insufficient memory & nodes are available
        insufficient devices.kubevirt.io
        insufficient intel.com
        insufficient openshift.io
        insufficient rdma
        """,
    ),
    Message(
        "kubelet-state-stale",
        Sure.CERTAIN,
        """
        memory states for the numa node and resource are different
        differs from state checkpoint policy
        could not restore state from checkpoint
        could not initialize checkpoint manager
        corrupt & checkpoint
        invalid state, please drain
        the expected machine state is different from the real one
        not all cpus & present in defaultcpuset
        current set of available cpus
        doesn't match with cpus in state
        configured policy & differs
        """,
    ),
    Message(
        "memory-reserved-unequal",
        Sure.CERTAIN,
        """
        invalid node allocatable configuration
        is not equal to the value & determined by node allocatable
        reserved memory & node allocatable
        reservedmemory & evictionhard
        the total amount & of type & not equal
        """,
    ),
    Message(
        "numa-nodes-many",
        Sure.CERTAIN,
        """
        unsupported on machines with more than & numa nodes
        """,
    ),
    Message(
        "no-cpu-reserved",
        Sure.CERTAIN,
        """
        static policy requires & non-zero
        static policy requires systemreserved
        unable to determine reserved cpu resources
        """,
    ),
    Message(
        "gate-host-devices-off",
        Sure.CERTAIN,
        """
        hostdevices feature gate is not enabled
        feature gate is not enabled in kubevirt & hostdevices
        """,
    ),
    Message(
        "gate-unknown-of-vm",
        Sure.CERTAIN,
        """
        feature gate is not enabled in kubevirt resource
        numa feature gate
        feature gate is not enabled
        """,
    ),
    Message(
        "device-not-permitted",
        Sure.CERTAIN,
        """
        is not permitted in permittedhostdevices
        not permitted in permittedhostdevices
        """,
    ),
    Message(
        "mapping-without-huge-pages",
        Sure.CERTAIN,
        """
        numa & requires hugepages
        numa & hugepages & must be
        numa & hugepages & required
        """,
    ),
    Message(
        "mapping-without-dedicated-cpus",
        Sure.CERTAIN,
        """
        numa & dedicatedcpuplacement & must be
        numa & dedicatedcpuplacement & require
        requires dedicated cpu placement
        dedicated cpu placement & numa
        """,
    ),
    Message(
        "claims-unallocated",
        Sure.LIKELY,
        """
        cannot allocate all claims
        resourceclaim & not created
        resourceclaim & not found
        waiting for & resourceclaim
        claim is not allocated
        could not allocate & claim
        unable to allocate & resourceclaim
        no matching devices & claim
        """,
    ),
    Message(
        "nova-numa-no-fit",
        Sure.CERTAIN,
        """
        requested instance numa topology cannot fit
        cannot fit the given host numa topology
        instance numa topology together with requested pci
        numa_topology & no fit
        fails numa topology requirements
        numatopologyfilter returned 0 hosts
        numa topology & insufficient compute resources
        """,
    ),
    Message(
        "nova-pci-no-device",
        Sure.LIKELY,
        """
        pci device request & failed
        pcidevicerequestfailed
        claim pci failed
        pcipassthroughfilter returned 0 hosts
        pci passthrough & no host
        pci alias & is not defined
        pciinvalidalias
        pci device & not found in
        pcidevicenotfound
        """,
    ),
    Message(
        "nova-pin-conflict",
        Sure.CERTAIN,
        """
        must be a subset of free cpu set
        cpupinninginvalid
        cpuunpinninginvalid
        cpupinningunknown
        cpuunpinningunknown
        cpus & must be a subset of
        """,
    ),
    Message(
        "nova-pages-no-fit",
        Sure.CERTAIN,
        """
        page size & is not supported by the host
        memorypagesizenotsupported
        memorypagesizeforbidden
        page size & forbidden against
        memorypagesizeinvalid
        insufficient free memory pages
        """,
    ),
    Message(
        "no-valid-host",
        Sure.NOT_ENOUGH,
        """
        no valid host was found
        """,
    ),
    Message(
        "slurm-gres-short",
        Sure.CERTAIN,
        """
        gres/gpu count reported lower than configured
        count reported lower than configured
        gres/gpu count too low
        """,
    ),
    Message(
        "slurm-shape-differs",
        Sure.CERTAIN,
        """
        node configuration differs from hardware
        """,
    ),
    Message(
        "slurm-memory-differs",
        Sure.CERTAIN,
        """
        low realmemory
        """,
    ),
    Message(
        "slurm-request-impossible",
        Sure.LIKELY,
        """
        requested node configuration is not available
        unable to confirm allocation for job
        more processors requested than permitted
        invalid generic resource (gres) specification
        unable to satisfy cpu bind request
        cpu binding outside of job step allocation
        cpu count per node can not be satisfied
        invalid gres
        """,
    ),
    Message(
        "kvm-resource-missing",
        Sure.CERTAIN,
        """
        insufficient devices.kubevirt.io/kvm
        devices.kubevirt.io/kvm & 0
        """,
    ),
    Message(
        "pod-anything-else",
        Sure.NOT_ENOUGH,
        """
        didn't match pod's node affinity
        unexpectedadmissionerror
        failedscheduling
        0/ & nodes are available
        """,
    ),
    Message(
        "slurm-nvml-missing",
        Sure.CERTAIN,
        """
        autodetect nvml functionality
        nvml functionality & lib
        nvml library was not found
        configured with nvml functionality
        """,
    ),
    Message(
        "slurm-gres-lines",
        Sure.CERTAIN,
        """
        can't stat gres.conf file
        waiting for gres.conf file
        duplicate records for gpu
        duplicate gres.conf record
        some records have & file
        gres.conf & invalid
        unable to parse & gres.conf
        gres_gpu & file & no such
        """,
    ),
    Message(
        "slurm-gres-missing",
        Sure.POSSIBLE,
        """
        gres=(null)
        """,
    ),
    Message(
        "claims-not-prepared",
        Sure.LIKELY,
        """
        failedpreparedynamicresources
        nodeprepareresources
        failed to prepare dynamic resources
        """,
    ),
    Message(
        "claims-misnamed",
        Sure.CERTAIN,
        """
        must specify one of: & resourceclaimname
        resourceclaims[ & invalid value
        """,
    ),
    Message(
        "nova-live-migration-numa",
        Sure.CERTAIN,
        """
        instance has an associated numa topology
        migrationprecheckerror & numa
        numa topolog & live migration
        """,
    ),
    Message(
        "vm-not-live-migratable",
        Sure.CERTAIN,
        """
        vmi is not migratable
        is not live migratable
        interfacenotlivemigratable
        disksnotlivemigratable
        not migratable:
        """,
    ),
)
