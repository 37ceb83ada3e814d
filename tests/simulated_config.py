"""A simulated configuration space that records every access, and trains as hardware does."""

from dataclasses import dataclass, field
from typing import NamedTuple

from homenode.bdf import Bdf
from homenode.change.journal import UNSETTLED, ChangeEntry, to_undo
from homenode.change.retrain.config_registers import SPEED_OF_CODE, ConfigSpace
from homenode.change.retrain.execution import RetrainResult, RetrainStep
from homenode.change.retrain.plan import RetrainPlan
from homenode.errors import HostError
from homenode.machine.topology import Host

AT = 0x40
"""Where the PCI Express capability lies, behind another at 0x80."""

CODE = {speed: code for code, speed in SPEED_OF_CODE.items()}
LINK_CONTROL, LINK_STATUS, LINK_CONTROL_2 = AT + 0x10, AT + 0x12, AT + 0x30


class Access(NamedTuple):
    """One access of a program under test."""

    kind: str  # "read" or "write"
    bdf: Bdf
    offset: int
    size: int
    value: int


class PowerCutError(Exception):
    """The program is killed at this write."""


@dataclass
class SimulatedConfig:
    """Every function of a host with its link registers."""

    host: Host
    # the speed code that a port's link comes up with, at most
    reaches: dict[Bdf, int] = field(default_factory=dict)
    trains_narrow: dict[Bdf, int] = field(default_factory=dict)  # lanes that it comes up with
    loses_link: set[Bdf] = field(default_factory=set)  # the link is lost at that training
    climbs: bool = False  # links gain one generation a training
    # the write (from 1) at which the program is killed, before or after it reached the register
    cut_at: int | None = None
    cut_after_write: bool = False
    accesses: list[Access] = field(default_factory=list)
    spaces: dict[Bdf, bytearray] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for device in self.host.pci_devices:
            space = bytearray(256)
            space[0:4] = b"\x86\x80\x2a\x35"
            space[0x06] = 0x10
            space[0x34] = 0x83  # two bits are reserved
            space[0x80:0x82] = bytes((0x01, AT | 3))  # power management
            space[AT : AT + 4] = bytes((0x10, 0, 0x42, 0))
            link = device.link
            if link is not None and link.max_gt_per_s and link.current_gt_per_s:
                most, now = CODE[link.max_gt_per_s], CODE[link.current_gt_per_s]
                width, lanes = link.max_width or 0, link.current_width or 0
                self._put(space, AT + 0x0C, 4, most | width << 4 | 1 << 20 | 7 << 24)
                self._put(
                    space, LINK_CONTROL, 2, 0x0243
                )  # ASPM, common clock and a fixed width are on
                self._put(space, LINK_STATUS, 2, now | lanes << 4 | 0x3000)
                self._put(space, AT + 0x2C, 4, ((1 << most) - 1) << 1)
                self._put(space, LINK_CONTROL_2, 2, 0x1040 | now)  # de-emphasis, compliance
            self.spaces[device.bdf] = space

    def read(self, bdf: Bdf, offset: int, size: int) -> int:
        if bdf not in self.spaces:
            raise HostError(f"{bdf}: not there")
        value = int.from_bytes(self.spaces[bdf][offset : offset + size], "little")
        self.accesses.append(Access("read", bdf, offset, size, value))
        return value

    def write(self, bdf: Bdf, offset: int, size: int, value: int) -> None:
        number = len(self.writes) + 1
        if self.cut_at == number and not self.cut_after_write:
            raise PowerCutError
        self.accesses.append(Access("write", bdf, offset, size, value))
        space = self.spaces[bdf]
        train = offset == LINK_CONTROL and value & 0x20
        self._put(space, offset, size, value & ~0x20 if offset == LINK_CONTROL else value)
        if train:
            self._train(bdf)
        if self.cut_at == number:
            raise PowerCutError

    @property
    def writes(self) -> list[Access]:
        return [access for access in self.accesses if access.kind == "write"]

    def _train(self, port: Bdf) -> None:
        space = self.spaces[port]
        lower = next(d.bdf for d in self.host.pci_devices if d.parent == port)
        wanted = space[LINK_CONTROL_2] & 0xF
        most = min(s[AT + 0x0C] & 0xF for s in (space, self.spaces[lower]))
        code = max(1, min(wanted or 1, most, self.reaches.get(port, 6)))
        if self.climbs:
            code = min(code, (space[LINK_STATUS] & 0xF) + 1)
        for each in (space, self.spaces[lower]):
            status = int.from_bytes(each[LINK_STATUS : LINK_STATUS + 2], "little")
            width = self.trains_narrow.get(port, status >> 4 & 0x3F)
            active = 0 if port in self.loses_link else 0x2000
            self._put(each, LINK_STATUS, 2, code | width << 4 | 0x1000 | active)
        self.loses_link.discard(port)

    @staticmethod
    def _put(space: bytearray, offset: int, size: int, value: int) -> None:
        space[offset : offset + size] = value.to_bytes(size, "little")


@dataclass
class MemoryJournal:
    """Lines that outlive the program under test."""

    lines: list[ChangeEntry] = field(default_factory=list)

    @property
    def open_entry(self) -> ChangeEntry | None:
        """The retrain that was cut short."""
        return next((one for one in to_undo(self.lines) if one.what in UNSETTLED), None)


def retrained(
    plan: RetrainPlan, space: ConfigSpace, journal: MemoryJournal | None = None
) -> RetrainResult:
    """A retrain carried out, or taken up again."""
    journal = journal or MemoryJournal()
    step = RetrainStep(plan, space, journal.open_entry, no_wait)
    step.do(journal.lines.append)
    return step.result


def no_wait(seconds: float) -> None:
    assert 0 < seconds < 1
