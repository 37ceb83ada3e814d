"""Records of the options of `homenode trial`, and the trial that they ask for. [I/O]"""

import os
import re
import time
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from homenode.cli.bench_options import AppArguments, RunArguments, SuiteArguments, bench_options
from homenode.cli.options import as_words
from homenode.cli.placing_options import (
    LayoutOptions,
    ManualOptions,
    PlacementOptions,
    SwitchOptions,
    VmOptions,
    plan_options,
)
from homenode.errors import UsageError
from homenode.hypervisor.connection import checked_uri, is_local
from homenode.measure.layouts.guest_access import ANSWER_S, STOP_S, GuestAccess, Transport
from homenode.plan.options import PciGranularity
from homenode.results.vantage import Vantage
from homenode.vm.layout import PRESETS, Pinning, preset_named, unknown_layout

if TYPE_CHECKING:
    from homenode.measure.layouts.prepare import TrialRequest
    from homenode.plan.options import PlanOptions

_access = partial(typer.Option, rich_help_panel="How the guest is reached")


@dataclass(frozen=True, slots=True)
class AccessOptions:
    """How a guest is reached, and how long it may take."""

    reach: Annotated[Transport | None, _access("--reach", help="Default: ssh.")] = None
    address: Annotated[
        str | None, _access("--address", metavar="ADDRESS", help="Default: libvirt's lease.")
    ] = None
    ssh_user: Annotated[str, _access("--ssh-user", metavar="USER", help="Also of the console.")] = (
        "root"
    )
    ssh_port: Annotated[int, _access("--ssh-port", metavar="N")] = 22
    ssh_key: Annotated[Path | None, _access("--ssh-key", metavar="FILE", help="A private key.")] = (
        None
    )
    probe: Annotated[
        Path | None,
        _access("--probe", metavar="FILE", help="The static probe to copy to the guest."),
    ] = None
    answer_within: Annotated[
        float,
        _access(
            "--answer-within",
            metavar="SECONDS",
            min=1,
            help="How long a guest may take to answer after its start.",
        ),
    ] = ANSWER_S
    stop_within: Annotated[
        float,
        _access(
            "--stop-within",
            metavar="SECONDS",
            min=0,
            help="How long a guest may take to shut down before it is stopped.",
        ),
    ] = STOP_S

    @property
    def is_default(self) -> bool:
        """Whether no option says how the guest is reached."""
        return self.guest == AccessOptions().guest

    @property
    def guest(self) -> GuestAccess:
        """The access itself."""
        key = None if self.ssh_key is None else str(self.ssh_key.absolute())
        transport = self.reach or Transport.SSH
        return GuestAccess(transport, self.address, self.ssh_user, self.ssh_port, key)


@dataclass(frozen=True, slots=True)
class TrialArguments:
    """The options of a new trial as they were given; see cli/trial.py."""

    layouts: tuple[str, ...]
    boots: int
    bare: bool
    as_copy: bool
    in_place: bool
    results: Path
    report: Path | None
    id: str | None
    dry_run: bool
    connect: str
    host: str | None
    page_size: str | None
    pci_granularity: PciGranularity
    suite: SuiteArguments
    app: AppArguments
    access: AccessOptions
    manual: ManualOptions
    placement: PlacementOptions


def is_experiment(suite: SuiteArguments) -> bool:
    """Whether the experiment on collectives is asked for."""
    return "collectives" in (suite.tests or "").replace(" ", "").split(",")


def default_layouts(suite: SuiteArguments) -> str:
    """Those that the experiment's questions compare; none of another trial."""
    return "default,pin,pin-numa,pin-numa-pci" if is_experiment(suite) else ""


def layouts_named(text: str) -> tuple[str, ...]:
    """Layouts of a list, the study's names as presets; unknown names stay, to be refused."""
    names = (one.strip() for one in text.split(",") if one.strip())
    return tuple(one if (found := preset_named(one)) is None else found.name for one in names)


def check(asked: TrialArguments) -> None:
    """Raises UsageError for options that do not go together."""
    if asked.as_copy == asked.in_place:
        raise UsageError(
            "give either --as-copy or --in-place",
            hint="--as-copy boots a copy with its own name and throw-away disks; --in-place boots "
            "the VM itself, and restores its definition after",
        )
    if not asked.layouts:
        raise UsageError(
            "--layouts: expected some, found none",
            hint="--layouts default,pin,pin-numa,pin-numa-pci",
        )
    check_access(asked.access.guest)
    for one in asked.layouts:
        if one not in PRESETS:
            raise unknown_layout(one, "--layouts")
    _check_lists(asked)
    if asked.bare and all(PRESETS[one].pinning is Pinning.NONE for one in asked.layouts):
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
    run = bench_options(own, asked.suite, asked.app, RunArguments(vantage=Vantage.GUEST))
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
        asked.layouts,
        asked.boots,
        run.seed,
        asked.bare,
        asked.as_copy,
        asked.results,
        placing,
        words,
        measuring,
        asked.access.guest,
        asked.manual.ranges(),
        _manual_words(asked),
    )


def _manual_words(asked: TrialArguments) -> tuple[str, ...]:
    """PUs that the user gives, as options of `homenode plan`."""
    if not asked.manual.node_pus:
        return ()
    words = [*as_words(asked.manual), *as_words(VmOptions(page_size=asked.page_size))]
    chosen = PlacementOptions(
        memory_mode=asked.placement.memory_mode, unequal_cells=asked.placement.unequal_cells
    )
    return (*words, *as_words(chosen))


def _check_lists(asked: TrialArguments) -> None:
    """Raises UsageError for PU lists together with options that choose PUs."""
    if not asked.manual.node_pus:
        asked.manual.ranges()
        return
    usual = PlacementOptions(
        memory_mode=asked.placement.memory_mode,
        unequal_cells=asked.placement.unequal_cells,
        device_locality=asked.placement.device_locality,
        emulator=asked.placement.emulator,
    )
    if asked.placement != usual:
        given = next(word for word in as_words(asked.placement) if word.startswith("--"))
        raise UsageError(f"give either --node-pus or {given}, not both")
    smt = [one for one in asked.layouts if PRESETS[one].pinning is Pinning.ALL_PUS]
    if smt and not asked.manual.sibling_pus:
        raise UsageError(f"--node-pus: expected --sibling-pus for layout {smt[0]}, found none")


def _placing(asked: TrialArguments) -> "tuple[PlanOptions, tuple[str, ...]]":
    """The placement, and the same as options of `homenode apply`."""
    vm = VmOptions(page_size=asked.page_size)
    switches = SwitchOptions(pci_granularity=asked.pci_granularity)
    # The GPUs are those that the VM has, whatever NVLink is between them.
    placement = replace(asked.placement, without_nvlink=True)
    layout = LayoutOptions(layout=asked.layouts[0])
    after = tuple(path.absolute() for path in asked.placement.after)
    words = [*as_words(vm), *as_words(replace(asked.placement, after=after)), *as_words(switches)]
    if asked.host is not None:
        words += ["--host", _from_anywhere(asked.host)]
    return plan_options(layout, vm, placement, switches), tuple(words)


def _from_anywhere(source: str) -> str:
    """A host's file, such that a command names it in whatever folder it is run."""
    return str(Path(source).absolute()) if Path(source).exists() else source


def _word(domain: str) -> str:
    """The domain's name as part of a folder's."""
    return re.sub(r"[^A-Za-z0-9_.-]+", "-", domain).strip("-.")[:60] or "vm"
