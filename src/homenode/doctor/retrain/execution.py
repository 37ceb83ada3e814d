"""Retrain: carry a plan out, verify, and restore what was found where it fails.

A journal is written before the first register is, so that an interrupted run is explained and
continued by the next one; what was found first is what is restored.
"""

from dataclasses import dataclass
from typing import Protocol

from homenode.bdf import Bdf
from homenode.catalogue import finding
from homenode.doctor.retrain.config_registers import (
    RETRAIN_LINK,
    SPEED_OF_CODE,
    TARGET_SPEED_MASK,
    ConfigSpace,
    LinkRegisters,
    control_2_at,
    control_at,
    read_registers,
)
from homenode.doctor.retrain.plan import RetrainPlan
from homenode.findings import Finding

_POLLS = 100
"""Of 10 ms: PCIe gives a training 1 s at most (7.5.3.7 and 6.7.3.3)."""

_MORE_TRAININGS = 3
"""Source: tenstorrent/tt-kmd#197, where links step up gradually rather than at once."""

_SOURCE = "PCIe 6.0, 7.5.3.7 (Retrain Link) and 7.5.3.19 (Target Link Speed)"


@dataclass(frozen=True, slots=True)
class JournalEntry:
    """An open retrain. control_2: Link Control 2 as first found. target_code: to be written."""

    port: Bdf
    device: Bdf
    control_2: int
    target_code: int


class Journal(Protocol):
    """Where open retrains are kept until they end; lost at boot, as the registers are."""

    def load(self, port: Bdf) -> JournalEntry | None:
        """The open retrain of a port."""

    def save(self, entry: JournalEntry) -> None:
        """Stores it, on the disk when this returns."""

    def clear(self, port: Bdf) -> None:
        """Forgets it."""


class Clock(Protocol):
    """Time that passes between two looks at a register."""

    def wait(self, seconds: float) -> None:
        """Waits."""


@dataclass(frozen=True, slots=True)
class RetrainResult:
    """log: each register that was changed, before and after. findings: () where all is well."""

    registers: LinkRegisters
    log: tuple[str, ...]
    findings: tuple[Finding, ...]


def explain_interrupted(entry: JournalEntry, now: LinkRegisters) -> Finding:
    """What an interrupted run has left behind, by what the registers say now."""
    found = entry.control_2 & TARGET_SPEED_MASK
    if now.target_code == entry.target_code and found != entry.target_code:
        state = "the new target was written; whether the training was started is unknown"
    elif now.target_code == found:
        state = "nothing had been written yet, or it was restored"
    else:
        state = "somebody else has written the target since"
    return finding(
        "retrain-interrupted",
        f"{entry.device} below port {entry.port}",
        expected=f"no open retrain: target {_speed(entry.target_code)}, Link Control 2 found as "
        f"{entry.control_2:#06x}",
        observed=f"Link Control 2 {now.control_2:#06x}, link at {_speed(now.current_code)} "
        f"x{now.current_width}: {state}",
        values={"device": entry.device},
        source=_SOURCE,
    )


def retrain(plan: RetrainPlan, space: ConfigSpace, journal: Journal, clock: Clock) -> RetrainResult:
    """Write the target, start the training, wait, verify. Does nothing where nothing is needed.

    Where the link does not come up at the target, the target that was found is restored and the
    link trained once more. Raises HostError where a register cannot be reached; the journal then
    stays for the next run.
    """
    open_entry = journal.load(plan.port)
    if not plan.is_needed:
        if open_entry is not None:
            journal.clear(plan.port)
        return RetrainResult(plan.before, (), ())
    found = plan.before.control_2 if open_entry is None else open_entry.control_2
    journal.save(JournalEntry(plan.port, plan.device, found, plan.target_code))
    log: list[str] = []
    _set_target(plan, space, plan.target_code, log)
    if _is_good(plan, plan.before):  # fast already: only its next training had a low target
        journal.clear(plan.port)
        return RetrainResult(read_registers(space, plan.port), tuple(log), ())
    after = _train(plan, space, clock, log)
    for _ in range(_MORE_TRAININGS):  # some links come up one generation at a time
        gains = after.is_up and plan.before.current_code < after.current_code
        if _is_good(plan, after) or not gains:
            break
        after = _train(plan, space, clock, log)
    if _is_good(plan, after):
        journal.clear(plan.port)
        return RetrainResult(after, tuple(log), ())
    _set_target(plan, space, found & TARGET_SPEED_MASK, log)
    back = _train(plan, space, clock, log)
    journal.clear(plan.port)
    failed = finding(
        "retrain-failed",
        f"{plan.device} below port {plan.port}",
        expected=f"{plan.target_gt_per_s:g} GT/s x{plan.expected_width} after training",
        observed=f"{_speed(after.current_code)} x{after.current_width}"
        f"{'' if after.is_up else ', no link'}; the target that was found is back: "
        f"{_speed(back.current_code)} x{back.current_width}{'' if back.is_up else ', NO LINK'}",
        case=None if back.is_up else "no link",
        source=_SOURCE,
    )
    return RetrainResult(back, tuple(log), (failed,))


def _set_target(plan: RetrainPlan, space: ConfigSpace, code: int, log: list[str]) -> None:
    """Masked read-modify-write of the target speed."""
    offset = control_2_at(plan.before.at)
    now = space.read(plan.port, offset, 2)
    wanted = now & ~TARGET_SPEED_MASK | code
    if wanted != now:
        space.write(plan.port, offset, 2, wanted)
    after = space.read(plan.port, offset, 2)
    log.append(f"{plan.port} Link Control 2: {now:#06x} -> {after:#06x}")


def _train(plan: RetrainPlan, space: ConfigSpace, clock: Clock, log: list[str]) -> LinkRegisters:
    offset = control_at(plan.before.at)
    control = space.read(plan.port, offset, 2)
    space.write(plan.port, offset, 2, control | RETRAIN_LINK)
    for _ in range(_POLLS):
        clock.wait(0.01)
        now = read_registers(space, plan.port)
        if not now.is_training and now.is_up:
            break
    log.append(
        f"{plan.port} Link Control: {control:#06x} -> {control | RETRAIN_LINK:#06x} (Retrain "
        f"Link), then {now.control:#06x}; Link Status {plan.before.status:#06x} -> "
        f"{now.status:#06x}: {_speed(now.current_code)} x{now.current_width}"
    )
    return now


def _is_good(plan: RetrainPlan, after: LinkRegisters) -> bool:
    return (
        after.is_up
        and not after.is_training
        and plan.has_speed(after)
        and after.current_width >= plan.expected_width
    )


def _speed(code: int) -> str:
    speed = SPEED_OF_CODE.get(code)
    return f"speed code {code}" if speed is None else f"{speed:g} GT/s"
