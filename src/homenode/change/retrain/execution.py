"""Retrain: execute a plan, verify it, and restore the original registers if it fails. [I/O]

A line is written before the first register, so that the next run can explain and continue an
interrupted one; the values found first are restored. A device that a VM has open is known by its
files: QEMU opens /dev/vfio/GROUP (or, with iommufd, /dev/vfio/devices/vfioN) before a VM runs and
keeps it until the VM ends. This does not need libvirt, which a hook must not call. Source:
Documentation/driver-api/vfio.rst.
"""

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path

from msgspec import Struct

from homenode import formats
from homenode.bdf import Bdf
from homenode.change.journal import UNSETTLED, ChangeEntry, ChangeHead, ChangeState, Journal, Note
from homenode.change.retrain.config_registers import (
    RETRAIN_LINK,
    SPEED_OF_CODE,
    TARGET_SPEED_MASK,
    ConfigSpace,
    LinkRegisters,
    control_2_at,
    control_at,
    read_registers,
)
from homenode.change.retrain.plan import Holders, RetrainPlan
from homenode.errors import HomenodeError, InputError
from homenode.findings import Finding, finding
from homenode.machine.link_path import LinkRate
from homenode.machine.pci import PciDevice
from homenode.safe.input_files import read_kernel_file
from homenode.safe.record_directory import RecordDirectory
from homenode.text import command_line, printable

KIND = "train-link"

_POLLS = 100
"""Polls 10 ms apart: PCIe gives a training 1 s at most (7.5.3.7 and 6.7.3.3)."""

_MORE_TRAININGS = 3
"""Source: tenstorrent/tt-kmd#197, where links step up gradually rather than at once."""

_SOURCE = "PCIe 6.0, 7.5.3.7 (Retrain Link) and 7.5.3.19 (Target Link Speed)"


class RetrainResult(Struct, frozen=True):
    """The link after a retrain, and the registers that were written."""

    registers: LinkRegisters
    log: tuple[str, ...]  # each register that was changed, before and after
    findings: tuple[Finding, ...]  # () if all is well


def explain_interrupted(entry: ChangeEntry, now: LinkRegisters) -> Finding:
    """Return the finding on an interrupted run, judged by the current registers."""
    control_2, target = _control_2(entry), int(entry.after or "0")
    old_target = control_2 & TARGET_SPEED_MASK
    if now.target_code == target and old_target != target:
        state = "the new target was written; whether the training was started is unknown"
    elif now.target_code == old_target:
        state = "nothing had been written yet, or it was restored"
    else:
        state = "another program has changed the target speed since"
    device = entry.facts["device"]
    return finding(
        "retrain-interrupted",
        f"{device} below port {entry.subject}",
        expected=f"no open retrain: target {_format_speed(target)}, Link Control 2 found as "
        f"{control_2:#06x}",
        observed=f"Link Control 2 {now.control_2:#06x}, link at {_format_speed(now.current_code)} "
        f"x{now.current_width}: {state}",
        values={"device": device},
        source=_SOURCE,
    )


class RetrainStep:
    """Set a port's target speed and train; the next run continues an interrupted one. begun: the
    entry of that run; its first Link Control 2 is the one that is restored. wait: between reads."""

    def __init__(
        self,
        plan: RetrainPlan,
        space: ConfigSpace,
        begun_entry: ChangeEntry | None = None,
        wait: Callable[[float], object] = time.sleep,
    ) -> None:
        self._plan, self._space, self._begun, self._wait = plan, space, begun_entry, wait
        self._log: list[str] = []
        self.result = RetrainResult(plan.before, (), ())

    def do(self, note: Note) -> ChangeEntry:
        """Write the target, start the training, wait, verify.

        If the link does not come up at the target, the original target is restored and the link is
        trained once more. Raises HostError if a register cannot be reached; the line then stays for
        the next run.
        """
        plan = self._plan
        old_control_2 = plan.before.control_2 if self._begun is None else _control_2(self._begun)
        target = f"CAP_EXP+30.w={old_control_2 & TARGET_SPEED_MASK:04x}:000f"
        entry = ChangeEntry(
            what=ChangeState.BEGIN,
            kind=KIND,
            subject=str(plan.port),
            before=f"{old_control_2:#06x}",
            after=str(plan.target_code),
            by_hand=command_line("setpci", "-s", str(plan.port), target, "CAP_EXP+10.w=0020:0020"),
            facts={"device": str(plan.device)},
        )
        if not plan.is_needed:
            entry = entry.with_state(ChangeState.DONE)
            if self._begun is not None:
                note(entry)
            return entry
        note(entry)
        self._set_target(plan.target_code)
        if _is_good(plan, plan.before):  # fast already: only its next training had a low target
            self.result = RetrainResult(
                read_registers(self._space, plan.port), tuple(self._log), ()
            )
            return _note_state(entry, ChangeState.DONE, note)
        after = self._train()
        for _ in range(_MORE_TRAININGS):  # some links come up one generation at a time
            gains = after.is_up and plan.before.current_code < after.current_code
            if _is_good(plan, after) or not gains:
                break
            after = self._train()
        if _is_good(plan, after):
            self.result = RetrainResult(after, tuple(self._log), ())
            return _note_state(entry, ChangeState.DONE, note)
        entry = self.undo(entry, note)
        back = self.result.registers
        failure = finding(
            "retrain-failed",
            f"{plan.device} below port {plan.port}",
            expected=f"{plan.target_gt_per_s:g} GT/s x{plan.expected_width} after training",
            observed=f"{_format_speed(after.current_code)} x{after.current_width}"
            f"{'' if after.is_up else ', no link'}; the target that was found is back: "
            f"{_format_speed(back.current_code)} x{back.current_width}"
            f"{'' if back.is_up else ', NO LINK'}",
            case=None if back.is_up else "no link",
            source=_SOURCE,
        )
        self.result = RetrainResult(back, tuple(self._log), (failure,))
        return entry

    def undo(self, entry: ChangeEntry, note: Note) -> ChangeEntry:
        """Write the original target, and train once more."""
        self._set_target(_control_2(entry) & TARGET_SPEED_MASK)
        self.result = RetrainResult(self._train(), tuple(self._log), ())
        return _note_state(entry, ChangeState.UNDONE, note)

    def _set_target(self, code: int) -> None:
        """Masked read-modify-write of the target speed."""
        port, offset = self._plan.port, control_2_at(self._plan.before.at)
        now = self._space.read(port, offset, 2)
        new = now & ~TARGET_SPEED_MASK | code
        if new != now:
            self._space.write(port, offset, 2, new)
        after = self._space.read(port, offset, 2)
        self._log.append(f"{port} Link Control 2: {now:#06x} -> {after:#06x}")

    def _train(self) -> LinkRegisters:
        port, before = self._plan.port, self._plan.before
        offset = control_at(before.at)
        control = self._space.read(port, offset, 2)
        self._space.write(port, offset, 2, control | RETRAIN_LINK)
        for _ in range(_POLLS):
            self._wait(0.01)
            now = read_registers(self._space, port)
            if not now.is_training and now.is_up:
                break
        self._log.append(
            f"{port} Link Control: {control:#06x} -> {control | RETRAIN_LINK:#06x} (Retrain "
            f"Link), then {now.control:#06x}; Link Status {before.status:#06x} -> "
            f"{now.status:#06x}: {_format_speed(now.current_code)} x{now.current_width}"
        )
        return now


def _note_state(entry: ChangeEntry, state: ChangeState, note: Note) -> ChangeEntry:
    entry = entry.with_state(state)
    note(entry)
    return entry


def _is_good(plan: RetrainPlan, after: LinkRegisters) -> bool:
    return (
        after.is_up
        and not after.is_training
        and plan.is_at_target(after)
        and after.current_width >= plan.expected_width
    )


def _control_2(entry: ChangeEntry) -> int:
    """Link Control 2 as first found."""
    return int(entry.before or "0", 16)


def _format_speed(code: int) -> str:
    speed = SPEED_OF_CODE.get(code)
    return f"speed code {code}" if speed is None else f"{speed:g} GT/s"


DIRECTORY = "/run/homenode/retrain"
"""Gone after a boot, which resets the registers as well."""

_BY_HAND = "check the port's Link Control 2 (setpci -s PORT CAP_EXP+30.w)"

LINKS_DIRECTORY = "/run/homenode/links"


def retrain_journal(port: Bdf, directory: str = DIRECTORY) -> Journal:
    """Return the journal of the link below a port. Writers lock its directory: libvirt's hook
    trains links within a start, while another homenode may hold the host's lock."""
    undo = f"setpci, as {_BY_HAND}"
    head = ChangeHead(run=str(port), command="homenode doctor retrain", undo=undo)
    return Journal(_open_records(f"{directory}/{port}"), head)


def retrain_journals(directory: str = DIRECTORY) -> Iterator[Journal]:
    """Yield the journals of all ports since the last boot."""
    for path in sorted(Path(directory).glob("*")):
        if path.is_dir():
            yield retrain_journal(Bdf.parse(path.name, str(path)), directory)


def open_retrain(journal: Journal) -> ChangeEntry | None:
    """Return the interrupted retrain; None if none was. Raises InputError."""
    try:
        return next((entry for entry in journal.to_undo() if entry.what in UNSETTLED), None)
    except InputError as error:
        raise InputError(error.message, hint=f"{_BY_HAND}, then remove the file") from None


class LinkRecords:
    """Rates of the links at start/begin of a domain, for the comparison at `started`."""

    def __init__(self, directory: str = LINKS_DIRECTORY) -> None:
        self._files = _open_records(directory)

    def load(self, gpus: Iterable[Bdf]) -> dict[Bdf, LinkRate]:
        """Return the saved rates of the GPUs with a readable record."""
        rates: dict[Bdf, LinkRate] = {}
        for gpu in gpus:
            try:
                content = self._files.read(f"{gpu}.json")
                if content is not None:
                    rates[gpu] = formats.decode(content, "link-rate", LinkRate, f"{gpu}.json")
            except HomenodeError:
                continue  # as if the hook had not been there at the start
        return rates

    def save(self, links: Mapping[Bdf, LinkRate]) -> None:
        """Save the rates until the next call. Raises HostError if they cannot be written."""
        self._files.make()
        for gpu, link in links.items():
            self._files.write(f"{gpu}.json", formats.encode("link-rate", link).encode())


def _open_records(directory: str) -> RecordDirectory:
    return RecordDirectory(Path(directory), hint=lambda number: "run as root")


_FIRST_PID_NAMESPACE = "pid:[4026531836]"
"""Source: PROC_PID_INIT_INO in include/linux/proc_ns.h."""


def find_holders(
    devices: Iterable[PciDevice], *, proc: str = "/proc", sys: str = "/sys"
) -> Holders:
    """Return the processes that have each function open. None if a process could not be inspected,
    or if the VFIO files of a function are unknown."""
    names_of_file = _open_vfio_files(proc)
    holders: dict[Bdf, tuple[str, ...] | None] = {}
    for device in devices:
        files = _list_vfio_files(device, sys)
        if names_of_file is None or ("vfio" in (device.driver or "") and not files):
            holders[device.bdf] = None
        else:
            names = {name for file in files for name in names_of_file.get(file, ())}
            holders[device.bdf] = tuple(sorted(names))
    return holders


def _list_vfio_files(device: PciDevice, sys: str) -> tuple[str, ...]:
    number = device.iommu_group
    group = [] if number is None else [f"/dev/vfio/{number}", f"/dev/vfio/noiommu-{number}"]
    directory = Path(sys) / "bus/pci/devices" / str(device.bdf) / "vfio-dev"
    try:
        names = sorted(entry.name for entry in directory.iterdir())
    except OSError:
        names = []
    return (*group, *(f"/dev/vfio/devices/{name}" for name in names))


def _open_vfio_files(proc: str) -> dict[str, set[str]] | None:
    """Return the processes that hold each VFIO file; None if some are hidden. In a container the
    host's QEMUs are hidden: only the first PID namespace shows them all."""
    try:
        if str(Path(proc, "self/ns/pid").readlink()) != _FIRST_PID_NAMESPACE:
            return None
    except OSError:
        return None
    holders: dict[str, set[str]] = {}
    for process in Path(proc).iterdir():
        if not process.name.isdecimal():
            continue
        try:
            descriptors = tuple((process / "fd").iterdir())
        except PermissionError:
            return None
        except OSError:  # it ended meanwhile
            continue
        for descriptor in descriptors:
            try:
                target = str(descriptor.readlink())
            except PermissionError:
                return None
            except OSError:
                continue
            if target.startswith("/dev/vfio/"):
                holders.setdefault(target, set()).add(f"{_name(process)} (process {process.name})")
    return holders


def _name(process: Path) -> str:
    content = read_kernel_file(str(process / "comm"))
    return printable((content or b"").decode("utf-8", "replace").strip()) or "?"
