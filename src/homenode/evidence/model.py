"""Evidence: the one store: published figures with what their authors conclude, and results.

A publication's figures are runs like any others; `origin` and `statistic` say what they are.
"""

from dataclasses import dataclass
from enum import StrEnum

from homenode.objective import Objective
from homenode.results.model import Run, Switches


class Certainty(StrEnum):
    """How sure a note is."""

    FACT = "fact"
    LIKELY = "likely"


@dataclass(frozen=True, slots=True)
class Choice:
    """What a document calls one of its configurations.

    name: the document's own word. switches: the layout's, None where it does not say. arrangement:
    what was chosen beside the layout.
    """

    name: str
    switches: Switches
    arrangement: str | None


@dataclass(frozen=True, slots=True)
class Claim:
    """A ratio that a document states.

    low, high: the metric of `choice` over that of `against`, as far as the printed digits reach.
    source: its sentence. disputed_by: the note that shows that its own figures say otherwise.
    """

    id: str
    system: str
    metric: str
    choice: str
    against: str
    low: float
    high: float
    source: str
    disputed_by: str | None


@dataclass(frozen=True, slots=True)
class PublishedVerdict:
    """What a publication recommends. system, objective: None = any. choices: its own names; none
    where it recommends nothing before the machine is repaired."""

    system: str | None
    objective: Objective | None
    choices: tuple[str, ...]
    source: str


@dataclass(frozen=True, slots=True)
class Note:
    """Where a document contradicts itself, its figures, or physics.

    systems, metrics: what it is about; empty = all. arithmetic: "expression = result", in plain
    Python arithmetic, so that anybody can check it.
    """

    id: str
    certainty: Certainty
    systems: tuple[str, ...]
    metrics: tuple[str, ...]
    text: str
    arithmetic: tuple[str, ...]

    def is_about(self, system: str, metrics: frozenset[str]) -> bool:
        """True where it bears on one of these metrics of this system."""
        here = not self.systems or system in self.systems
        return here and (not self.metrics or bool(metrics.intersection(self.metrics)))


@dataclass(frozen=True, slots=True)
class System:
    """A machine that a document tells of.

    gpu, cpu, gpus: as printed, None where they are not. host: the shipped description of it.
    remedy: what to do before anything of it is used; None where its figures are sound.
    """

    name: str
    gpu: str | None
    gpus: int | None
    cpu: str | None
    host: str | None
    remedy: str | None


@dataclass(frozen=True, slots=True)
class Publication:
    """One document.

    runs: a run for each system and choice; every sample keeps its sentence in `sources`, which is
    as long as the run's samples and in their order. remarks: sentences with figures that are no
    measurement of a metric.
    """

    id: str
    title: str
    publisher: str
    published: str
    choices: tuple[Choice, ...]
    systems: tuple[System, ...]
    runs: tuple[Run, ...]
    sources: tuple[tuple[str, ...], ...]
    claims: tuple[Claim, ...]
    verdicts: tuple[PublishedVerdict, ...]
    notes: tuple[Note, ...]
    remarks: tuple[str, ...]

    def system(self, name: str) -> System | None:
        """The machine of that name, or None."""
        return next((one for one in self.systems if one.name == name), None)

    def choice(self, name: str) -> Choice | None:
        """The configuration of that name, or None."""
        return next((one for one in self.choices if one.name == name), None)


@dataclass(frozen=True, slots=True)
class Evidence:
    """All that is known. runs: imported results and own ones, of any machine."""

    publications: tuple[Publication, ...]
    runs: tuple[Run, ...] = ()
