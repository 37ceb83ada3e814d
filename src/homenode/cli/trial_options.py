"""Records of the options of `homenode trial`, and the trial that they ask for. [I/O]"""

import os
import re
import time
from pathlib import Path
from typing import TYPE_CHECKING

from msgspec import structs

from homenode.cli.arguments.measure import (
    RunArguments,
    SuiteArguments,
    TrialArguments,
)
from homenode.cli.bench_options import bench_options
from homenode.cli.command import as_words
from homenode.errors import UsageError
from homenode.measure.layouts.guest_access import GuestAccess, Transport
from homenode.measure.results.vantage import Vantage
from homenode.vm.hypervisor.connection import checked_uri, is_local
from homenode.vm.layout import PRESETS, Pinning, preset_named, unknown_layout
from homenode.vm.plan_options import (
    DeviceLocality,
    EmulatorPolicy,
    MemoryMode,
    PciGranularity,
    PlanOptions,
)

if TYPE_CHECKING:
    from homenode.measure.layouts.prepare import TrialRequest


def is_experiment(suite: SuiteArguments) -> bool:
    """Whether the experiment on collectives is asked for."""
    return "collectives" in (suite.tests or "").replace(" ", "").split(",")


def layouts_of(asked: TrialArguments) -> tuple[str, ...]:
    """Layouts to compare, the study's names as presets; unknown names stay, to be refused.

    Without a list those that the experiment's questions compare; none of another trial.
    """
    usual = "default,pin,pin-numa,pin-numa-pci" if is_experiment(asked.suite) else ""
    names = (one.strip() for one in (asked.layouts or usual).split(",") if one.strip())
    return tuple(one if (found := preset_named(one)) is None else found.name for one in names)


def check(asked: TrialArguments) -> None:
    """Raises UsageError for options that do not go together."""
    if asked.as_copy == asked.in_place:
        raise UsageError(
            "give either --as-copy or --in-place",
            hint="--as-copy boots a copy with its own name and throw-away disks; --in-place boots "
            "the VM itself, and restores its definition after",
        )
    layouts = layouts_of(asked)
    if not layouts:
        raise UsageError(
            "--layouts: expected some, found none",
            hint="--layouts default,pin,pin-numa,pin-numa-pci",
        )
    check_access(asked.access.guest)
    for one in layouts:
        if one not in PRESETS:
            raise unknown_layout(one, "--layouts")
    _check_lists(asked)
    if asked.bare and all(PRESETS[one].pinning is Pinning.NONE for one in layouts):
        raise UsageError(
            "--bare: expected a layout that pins as well, found none: it says which PUs",
            hint="--layouts default,pin",
        )
    if asked.host is None and not is_local(checked_uri(asked.connect)):
        raise UsageError(
            f"--connect {asked.connect}: expected --host as well, since the daemon is on another "
            "machine",
            hint="homenode capture --ssh HOST -o host.tar.gz, then --host host.tar.gz",
        )
    if asked.bare and not is_local(checked_uri(asked.connect)):
        raise UsageError("--bare: expected a libvirt of this machine: the suite runs here")


def check_access(reaching: GuestAccess) -> None:
    """Raises UsageError for an address, user, port or key that no guest could be reached by."""
    from homenode.measure.access.ssh import SshChannel

    if reaching.transport is not Transport.SSH:
        return
    SshChannel(reaching.address or "localhost", reaching.user, Path("known_hosts"), reaching.port)
    if reaching.key is not None and not os.access(reaching.key, os.R_OK):
        raise UsageError(
            f"--ssh-key {reaching.key}: expected a private key that can be read, found none"
        )


def trial_request(domain: str, asked: TrialArguments) -> "TrialRequest":
    """The trial that is asked for. Its name has the time in it unless the user gave one."""
    from homenode.measure.layouts.prepare import TrialRequest
    from homenode.measure.layouts.trial_config import Measuring

    own = asked.id or f"{_word(domain)}-{time.strftime('%Y%m%d-%H%M%S', time.gmtime())}"
    run = bench_options(own, asked.suite, asked.own, RunArguments(vantage=Vantage.GUEST))
    measuring = Measuring(
        run.suite,
        run.repeats,
        run.seed,
        run.app,
        asked.access.answer_within,
        asked.access.stop_within,
    )
    placing, words = _placing(asked)
    return TrialRequest(
        own,
        layouts_of(asked),
        asked.boots or (1 if is_experiment(asked.suite) else 3),
        run.seed,
        asked.bare,
        asked.as_copy,
        asked.results,
        placing,
        words,
        measuring,
        asked.access.guest,
        asked.manual if asked.manual.node_pus else None,
        _manual_words(asked),
    )


def _manual_words(asked: TrialArguments) -> tuple[str, ...]:
    """PUs that the user gives, as options of `homenode plan`."""
    if not asked.manual.node_pus:
        return ()
    given = asked.options
    chosen = PlanOptions(
        page_bytes=given.page_bytes,
        memory_mode=given.memory_mode,
        unequal_cells=given.unequal_cells,
    )
    return (*as_words(asked.manual), *as_words(chosen))


def _check_lists(asked: TrialArguments) -> None:
    """Raises UsageError for PU lists together with options that choose PUs."""
    if not asked.manual.node_pus:
        if asked.manual.sibling_pus:
            raise UsageError("--sibling-pus: expected --node-pus as well, found none")
        return
    others = structs.replace(
        asked.options,
        page_bytes=None,
        pci_granularity=PciGranularity.CELL,
        memory_mode=MemoryMode.STRICT,
        unequal_cells=False,
        device_locality=DeviceLocality.PREFER,
        emulator_policy=EmulatorPolicy.AUTO,
    )
    given = ["--after"] if asked.after else [*as_words(others)]
    if given:
        raise UsageError(f"give either --node-pus or {given[0]}, not both")
    smt = [one for one in layouts_of(asked) if PRESETS[one].pinning is Pinning.ALL_PUS]
    if smt and not asked.manual.sibling_pus:
        raise UsageError(f"--node-pus: expected --sibling-pus for layout {smt[0]}, found none")


def _placing(asked: TrialArguments) -> "tuple[PlanOptions, tuple[str, ...]]":
    """The placement, and the same as options of `homenode apply`."""
    # The GPUs are those that the VM has, whatever NVLink is between them.
    options = structs.replace(asked.options, layout=layouts_of(asked)[0], without_nvlink=True)
    words = [*as_words(asked.options)]
    for path in asked.after:
        words += ["--after", str(path.absolute())]
    if asked.host is not None:
        words += ["--host", _from_anywhere(asked.host)]
    return options, tuple(words)


def _from_anywhere(source: str) -> str:
    """A host's file, such that a command names it in whatever folder it is run."""
    return str(Path(source).absolute()) if Path(source).exists() else source


def _word(domain: str) -> str:
    """The domain's name as part of a folder's."""
    return re.sub(r"[^A-Za-z0-9_.-]+", "-", domain).strip("-.")[:60] or "vm"
