"""TrialOptions: the options of `homenode trial` as typed, and the trial that they ask for. [I/O]"""

import os
import re
import time
from dataclasses import dataclass
from pathlib import Path

from homenode.cli.bench_orders import BenchArguments, orders_of
from homenode.cli.placing_options import host_reserve_of, size_bytes
from homenode.cpuset import CpuSet
from homenode.errors import UsageError
from homenode.hypervisor.connection import checked_uri, is_local
from homenode.measure.access.ssh import SshTarget
from homenode.measure.layouts.guest_access import GuestAccess, Transport
from homenode.measure.layouts.prepare import TrialRequest
from homenode.measure.layouts.trial_config import Measuring
from homenode.plan.layout import PRESETS, Pinning, preset_named
from homenode.plan.manual import ManualRanges
from homenode.plan.options import PlanOptions
from homenode.plan.request import (
    DeviceLocality,
    EmulatorPolicy,
    MemoryMode,
    PciGranularity,
    Policy,
)
from homenode.results.vantage import Vantage


@dataclass(frozen=True, slots=True)
class TrialOptions:
    """The options as they were typed; see cli/trial.py."""

    layouts: tuple[str, ...]
    boots: int
    seed: int
    bare: bool
    as_copy: bool
    in_place: bool
    results: Path
    report: Path | None
    id: str | None
    dry_run: bool
    connect: str
    host: str | None
    tests: str | None
    repeat: int
    quick: bool
    full: bool
    app: str | None
    metric: str | None
    lower: bool
    nccl_max_msg: str
    python: str
    reaching: GuestAccess
    probe: Path | None
    answer_s: float
    stop_s: float
    page_size: str | None
    policy: Policy
    max_nodes: int | None
    keep_vcpus: bool
    unequal_cells: bool
    memory_mode: MemoryMode
    reserve_pus: str
    host_reserve: str | None
    housekeeping_pus: str
    device_locality: DeviceLocality
    emulator: EmulatorPolicy
    pci_granularity: PciGranularity
    node_pus: tuple[str, ...] = ()
    sibling_pus: tuple[str, ...] = ()


def layouts_named(text: str) -> tuple[str, ...]:
    """Layouts of a list, the study's names as presets; what is none stays, to be refused."""
    names = (one.strip() for one in text.split(",") if one.strip())
    return tuple(one if (found := preset_named(one)) is None else found.name for one in names)


def check(asked: TrialOptions) -> None:
    """Raises UsageError for options that do not go together."""
    if asked.as_copy == asked.in_place:
        found = "both" if asked.as_copy else "neither"
        raise UsageError(
            f"--as-copy, --in-place: expected one of them, found {found}",
            hint="--as-copy boots a copy with its own name and throw-away disks, and the VM stays "
            "as it is; --in-place boots the VM itself, and gives its definition back after",
        )
    if not asked.layouts:
        raise UsageError(
            "--layouts: expected some, found none",
            hint="--layouts default,pin,pin-numa,pin-numa-pci",
        )
    check_access(asked.reaching)
    unknown = [one for one in asked.layouts if one not in PRESETS]
    if unknown:
        raise UsageError(
            f"--layouts: expected some of {', '.join(PRESETS)}, found {', '.join(unknown)}"
        )
    _check_lists(asked)
    if asked.bare and all(PRESETS[one].pinning is Pinning.NONE for one in asked.layouts):
        raise UsageError(
            "--bare: expected a layout that pins beside it, found none: it says which PUs",
            hint="--layouts default,pin",
        )
    if asked.host is None and not is_local(checked_uri(asked.connect)):
        raise UsageError(
            f"--connect {asked.connect}: expected --host beside a daemon on another machine, found "
            "none",
            hint="homenode capture --ssh HOST -o host.tar.gz, then --host host.tar.gz",
        )
    if asked.bare and not is_local(checked_uri(asked.connect)):
        raise UsageError("--bare: expected a libvirt of this machine: the suite runs here")


def check_access(reaching: GuestAccess) -> None:
    """Raises UsageError for an address, user, port or key that no guest could be reached by."""
    if reaching.transport is not Transport.SSH:
        return
    SshTarget(reaching.address or "localhost", reaching.user, Path("known_hosts"), reaching.port)
    if reaching.key is not None and not os.access(reaching.key, os.R_OK):
        raise UsageError(
            f"--ssh-key {reaching.key}: expected a private key that can be read, found none"
        )


def wanted(domain: str, asked: TrialOptions) -> TrialRequest:
    """The trial that is asked for. Its name has the time in it unless the user gave one."""
    own = asked.id or f"{_word(domain)}-{time.strftime('%Y%m%d-%H%M%S', time.gmtime())}"
    orders = orders_of(
        BenchArguments(
            name=own, plan=None, domain_xml=None, tests=asked.tests, repeat=asked.repeat,
            quick=asked.quick, full=asked.full, seed=asked.seed, app=asked.app,
            metric=asked.metric, lower_is_better=asked.lower, nccl_max_msg=asked.nccl_max_msg,
            layout=None, boot=None, vantage=Vantage.GUEST, pus=None, nodes=None, host_kind=None,
            arrangement=None, python=asked.python, force=False,
        )
    )  # fmt: skip
    measuring = Measuring(
        orders.wishes, orders.repeats, orders.seed, orders.app, asked.answer_s, asked.stop_s
    )
    placing, words = _placing(asked)
    return TrialRequest(
        own, asked.layouts, asked.boots, asked.seed, asked.bare, asked.as_copy, asked.results,
        placing, words, measuring, asked.reaching, *_ranges(asked),
    )  # fmt: skip


def _ranges(asked: TrialOptions) -> tuple[ManualRanges | None, tuple[str, ...]]:
    """PUs that the user gives, and the same as options of `homenode plan`."""
    if not asked.node_pus:
        return None, ()
    words = [w for text in asked.node_pus for w in ("--node-pus", text)]
    words += [w for text in asked.sibling_pus for w in ("--sibling-pus", text)]
    if asked.page_size is not None:
        words += ["--page-size", asked.page_size]
    if asked.memory_mode is not MemoryMode.STRICT:
        words += ["--memory-mode", str(asked.memory_mode)]
    words += ["--unequal-cells"] * asked.unequal_cells
    ranges = ManualRanges(
        tuple(CpuSet.parse(text, "--node-pus") for text in asked.node_pus),
        tuple(CpuSet.parse(text, "--sibling-pus") for text in asked.sibling_pus),
    )
    return ranges, tuple(words)


def _check_lists(asked: TrialOptions) -> None:
    """Raises UsageError for PU lists beside options that choose PUs."""
    if not asked.node_pus:
        if asked.sibling_pus:
            raise UsageError("--sibling-pus: expected --node-pus beside it, found none")
        return
    choosing = {
        "--policy": asked.policy is not Policy.CORES_FIRST,
        "--max-nodes": asked.max_nodes is not None,
        "--keep-vcpus": asked.keep_vcpus,
        "--reserve-pus": bool(asked.reserve_pus),
        "--host-reserve": asked.host_reserve is not None,
        "--housekeeping-pus": bool(asked.housekeeping_pus),
    }
    given = [option for option, is_given in choosing.items() if is_given]
    if given:
        raise UsageError(f"--node-pus: expected no option that chooses PUs, found {given[0]}")
    smt = [one for one in asked.layouts if PRESETS[one].pinning is Pinning.ALL_PUS]
    if smt and not asked.sibling_pus:
        raise UsageError(f"--node-pus: expected --sibling-pus for layout {smt[0]}, found none")


def _placing(asked: TrialOptions) -> tuple[PlanOptions, tuple[str, ...]]:
    """The placement, and the same as options of `homenode apply`."""
    host_cores, host_memory_bytes = host_reserve_of(asked.host_reserve)
    placing = PlanOptions(
        layout=asked.layouts[0],
        page_bytes=size_bytes("--page-size", asked.page_size),
        policy=asked.policy,
        max_nodes=asked.max_nodes,
        keep_vcpus=asked.keep_vcpus,
        unequal_cells=asked.unequal_cells,
        memory_mode=asked.memory_mode,
        reserved_pus=CpuSet.parse(asked.reserve_pus, "--reserve-pus"),
        host_cores=host_cores,
        host_memory_bytes=host_memory_bytes,
        housekeeping_pus=CpuSet.parse(asked.housekeeping_pus, "--housekeeping-pus"),
        device_locality=asked.device_locality,
        emulator_policy=asked.emulator,
        pci_granularity=asked.pci_granularity,
        without_nvlink=True,  # the GPUs are those that the VM has
    )
    told = (
        ("--page-size", asked.page_size, None),
        ("--policy", str(asked.policy), str(Policy.CORES_FIRST)),
        ("--max-nodes", None if asked.max_nodes is None else str(asked.max_nodes), None),
        ("--memory-mode", str(asked.memory_mode), str(MemoryMode.STRICT)),
        ("--reserve-pus", asked.reserve_pus, ""),
        ("--host-reserve", asked.host_reserve, None),
        ("--housekeeping-pus", asked.housekeeping_pus, ""),
        ("--device-locality", str(asked.device_locality), str(DeviceLocality.PREFER)),
        ("--emulator", str(asked.emulator), str(EmulatorPolicy.AUTO)),
        ("--pci-granularity", str(asked.pci_granularity), str(PciGranularity.CELL)),
        ("--host", _from_anywhere(asked.host), None),
    )
    words = [
        w for option, value, usual in told if value and value != usual for w in (option, value)
    ]
    words += ["--keep-vcpus"] * asked.keep_vcpus + ["--unequal-cells"] * asked.unequal_cells
    return placing, tuple(words)


def _from_anywhere(source: str | None) -> str | None:
    """A host's file, such that a command names it in whatever folder it is run."""
    return str(Path(source).absolute()) if source and Path(source).exists() else source


def _word(domain: str) -> str:
    """The domain's name as part of a folder's."""
    return re.sub(r"[^A-Za-z0-9_.-]+", "-", domain).strip("-.")[:60] or "vm"
