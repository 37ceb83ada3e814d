"""MessagesCollectives: what NCCL, CUDA and verbs print when a job fails."""

from homenode.why.message import Message, Sure

ROWS = (
    Message(
        "nccl-duplicate-gpu",
        Sure.CERTAIN,
        """
        duplicate gpu detected
        """,
    ),
    Message(
        "nccl-shm-small",
        Sure.CERTAIN,
        """
        error while creating shared memory segment
        posix_fallocate failed & no space left
        shm & no space left on device
        /dev/shm & no space left
        out of shared memory
        """,
    ),
    Message(
        "nccl-memory-lock",
        Sure.CERTAIN,
        """
        ibv_reg_mr & cannot allocate memory
        ibv_create_qp & cannot allocate memory
        ibv_create_cq & cannot allocate memory
        couldn't allocate mr
        ibv_alloc_pd & cannot allocate
        libibverbs: warning: rlimit_memlock
        """,
    ),
    Message(
        "nccl-gdr-register",
        Sure.LIKELY,
        """
        ibv_reg_mr & bad address
        ibv_reg_mr & invalid argument
        ibv_reg_mr_iova & bad address
        ibv_reg_mr_iova & invalid argument
        ibv_reg_dmabuf_mr &
        """,
    ),
    Message(
        "nccl-link-dead",
        Sure.LIKELY,
        """
        failed status 12
        got completion with error:
        got async event & port error
        got completion & error 12
        got completion & status=12
        vendor err 129
        transport retry counter exceeded
        ibv_wc_retry_exc_err
        work request flushed error
        local qp & timed out
        vendor_err 129
        vendor error 129
        """,
    ),
    Message(
        "nccl-gid-wrong",
        Sure.CERTAIN,
        """
        failed to modify qp & rtr
        ibv_modify_qp failed & connection timed out
        ibv_modify_qp failed & network is unreachable
        ibv_modify_qp failed & invalid argument
        ibv_modify_qp failed & no such device
        ibv_modify_qp & errno 110
        ibv_modify_qp & errno 101
        ibv_modify_qp & errno 22
        failed to modify qp to
        unable to connect & gid
        """,
    ),
    Message(
        "nccl-no-route",
        Sure.LIKELY,
        """
        unable to init the socket connection
        couldn't connect to
        client socket has timed out
        server socket has failed to listen
        client socket has failed to connect
        no route to host
        connection refused & nccl
        nccl & connection refused
        connect to & failed : software caused connection abort
        socketstartconnect: connect
        socketpollconnect
        connection timed out & nccl
        nccl & connection timed out
        connect to & returned connection timed out
        connect to & returned connection refused
        socket & connect & no route
        """,
    ),
    Message(
        "nccl-no-interface",
        Sure.CERTAIN,
        """
        bootstrap : no socket interface found
        no socket interface found
        no usable interface
        could not find: & ifname
        found 0 usable interface
        """,
    ),
    Message(
        "nccl-ranks-differ",
        Sure.LIKELY,
        """
        mismatched collective
        message truncated : received
        nccl version mismatch
        mismatch between & nccl versions
        mismatching rank
        invalid usage & different
        """,
    ),
    Message(
        "nccl-p2p-off",
        Sure.LIKELY,
        """
        cannot access peer device
        p2p is disabled between
        peer access is not supported between these two devices
        p2p is disabled between nvlink connected
        p2p not supported
        p2p is not available over pcie
        p2p & not & available over pcie
        """,
    ),
    Message(
        "nccl-nvls-failed",
        Sure.LIKELY,
        """
        failed to bind nvlink sharp
        nvls & multicast & failed
        nvls & cumulticast
        cumulticastadddevice
        cumulticastbindmem
        transport/nvls.cc & warn
        nvls.cc & failure
        """,
    ),
    Message(
        "driver-too-old",
        Sure.CERTAIN,
        """
        cuda driver version is insufficient
        unsupported ptx version
        compiled with an unsupported toolchain
        forward compatibility was attempted on non supported hw
        the nvidia driver on your system is too old
        no kernel image is available for execution
        """,
    ),
    Message(
        "gpu-not-visible",
        Sure.LIKELY,
        """
        no cuda-capable device is detected
        invalid device ordinal
        cuda_error_no_device
        cuda failure & invalid device ordinal
        no cuda gpus are available
        could not load nvml library
        failed to initialize nvml: could not load
        libnvidia-ml.so: cannot open
        detected non-nvml platform
        """,
    ),
    Message(
        "nccl-fault-unnamed",
        Sure.NOT_ENOUGH,
        """
        some nccl operations have failed or timed out
        nccl communicator was aborted
        unhandled system error
        unhandled cuda error
        ncclunhandledcudaerror
        ncclsystemerror
        ncclinternalerror
        internal error - please report this issue to the nccl developers
        ncclremoteerror
        remote process exited or there was a network error
        watchdog caught collective operation timeout
        processgroupnccl & timed out
        ncclinvalidusage
        collective operation timeout
        """,
    ),
    Message(
        "rdma-device-missing",
        Sure.LIKELY,
        """
        failed to initialize any net plugin
        net plugin ib & failed
        no ib devices found
        ib device & not found
        failed to get ib devices list
        unable to find the infiniband
        no matching ib device
        libibverbs: warning: no userspace device-specific driver found
        couldn't find a usable ib
        ibv_open_device & failed
        """,
    ),
    Message(
        "rdma-port-down",
        Sure.POSSIBLE,
        """
        state: & port_down
        state: down
        physical state: disabled
        phys_state: & polling
        phys_state: & disabled
        port_down (1)
        state: initializing
        port_init (2)
        """,
    ),
    Message(
        "nccl-shm-gone",
        Sure.LIKELY,
        """
        error while attaching to shared memory segment
        """,
    ),
    Message(
        "efa-missing",
        Sure.LIKELY,
        """
        net/ofi & no eligible providers
        net/ofi & failed
        unable to find a protocol that worked
        fi_getinfo & no data available
        """,
    ),
    Message(
        "nccl-cumem-refused",
        Sure.LIKELY,
        """
        cumemcreate & fail
        cumem host & fail
        cumemimportfromshareablehandle
        cumemexporttoshareablehandle
        cuda failure 801
        cumem & operation not supported
        cumem & operation not permitted
        cumem & invalid argument
        """,
    ),
    Message(
        "gpu-busy",
        Sure.LIKELY,
        """
        devices are busy or unavailable
        all cuda-capable devices are busy
        """,
    ),
    Message(
        "mpi-bind-overload",
        Sure.CERTAIN,
        """
        binding more processes than
        not enough slots available
        bind to & more processes than cpus
        """,
    ),
)
