"""Evidence: the one store: published figures with what their authors conclude, what is computed
rather than measured, and results.

A publication's figures are runs like any others; `origin` and `statistic` say what they are. What
is shown of them is what was printed, letter by letter.
"""

from enum import StrEnum

import msgspec
from msgspec import Struct

from homenode.measure.results.model import Run, Switches
from homenode.measure.results.vantage import Vantage
from homenode.objective import Objective


class Certainty(StrEnum):
    """How sure a note is."""

    FACT = "fact"
    LIKELY = "likely"


class PublishedEntry(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A table of a document's file, as it stands there: docs/formats/published.md has its keys."""


class PublishedChoice(Struct, frozen=True):
    """What a document calls one of its configurations.

    name: the document's own word. switches: the layout's, None where it does not say. arrangement:
    what was chosen in addition to the layout.
    """

    name: str
    switches: Switches
    arrangement: str | None


class Claim(PublishedEntry, frozen=True, rename={"other_system": "against_system"}):
    """A ratio that a document states.

    ratio: least and greatest, of the metric of `choice` over that of `against`, as far as the
    printed digits reach. other_system: the machine of `against` where machines are compared.
    source: its sentence. disputed_by: the note that shows that its own figures say otherwise.
    """

    id: str
    system: str
    metric: str
    choice: str
    against: str
    ratio: tuple[float, float]
    source: str
    other_system: str | None = None
    disputed_by: str | None = None

    @property
    def against_system(self) -> str:
        """The machine of `against`."""
        return self.other_system or self.system


class PublishedVerdict(PublishedEntry, frozen=True):
    """What a publication recommends.

    system, objective: None = any. work: a use that is no objective, in its words: it answers none.
    grade: its word for the whole machine. choices: its own names; none where it recommends nothing
    before the machine is repaired.
    """

    choices: tuple[str, ...]
    source: str
    system: str | None = None
    objective: Objective | None = None
    work: str | None = None
    grade: str | None = None


class PrintedFigure(Struct, frozen=True):
    """A figure as it was printed: for each choice the text with its unit. source: the sentence.

    near: by choice, the devices whose thread and memory were on their own node, as the source says.
    """

    system: str
    metric: str
    variant: str | None
    texts: tuple[tuple[str, str], ...]
    source: str
    near: tuple[tuple[str, tuple[int, ...]], ...] = ()


class PrintedEffect(PublishedEntry, frozen=True):
    """A row of a publication's own summary of what each switch does, word for word.

    metric: the nearest of ours. systems: which of its machines the row is of, as far as it says.
    """

    label: str
    metric: str
    pinning: str
    cells: str
    siblings: str
    risk: str
    systems: tuple[str, ...] = ()


class Remark(PublishedEntry, frozen=True, rename={"is_advice": "advice"}):
    """A sentence that is no measurement. systems: whom it is about, empty = no machine.

    is_advice: what its authors recommend. ours: what homenode does about it.
    """

    source: str
    systems: tuple[str, ...] = ()
    is_advice: bool = False
    ours: str | None = None


class FieldReport(PublishedEntry, frozen=True):
    """A figure that somebody mentions, too confounded to decide anything.

    of: what was compared with what. change: the least and greatest ratio, above 1 for the better;
    None where nothing was compared. confounders: what else may explain it.
    """

    source: str
    of: str
    figures: str
    confounders: tuple[str, ...]
    change: tuple[float, float] | None = None
    arithmetic: tuple[str, ...] = ()


class Derivation(PublishedEntry, frozen=True, rename={"is_open": "open"}):
    """What follows from a program's own code or from arithmetic, of machines with several nodes and
    GPUs: computed, and never measured.

    favours, over: the first of two layouts should be no worse; None where it orders none. is_open:
    a question that it leaves, and method is what would settle it.
    """

    id: str
    objective: Objective
    text: str
    method: str
    favours: str | None = None
    over: str | None = None
    is_open: bool = False


class Note(PublishedEntry, frozen=True):
    """Where a document contradicts itself, its figures, or physics.

    systems, metrics: what it is about; empty = all. arithmetic: "expression = result", in plain
    Python arithmetic, so that anybody can check it.
    """

    id: str
    certainty: Certainty
    text: str
    systems: tuple[str, ...] = ()
    metrics: tuple[str, ...] = ()
    arithmetic: tuple[str, ...] = ()

    def is_about(self, system: str, metrics: frozenset[str]) -> bool:
        """True where it bears on one of these metrics of this system."""
        here = not self.systems or system in self.systems
        return here and (not self.metrics or bool(metrics.intersection(self.metrics)))


class System(PublishedEntry, frozen=True):
    """A machine that a document shows.

    gpu, cpu, gpus: as printed, None where they are not. host: the shipped description of it.
    remedy: what to do before anything of it is used; None where its figures are sound. pcie: the
    generation of its links, as printed. facts: rows of tables about it, as printed. vcpus: by
    choice. inferred_vcpus: choices whose number of vCPUs is not printed, but follows from what is.
    unusable: why nothing may be concluded from its figures.
    """

    name: str
    gpu: str | None = None
    gpus: int | None = None
    cpu: str | None = None
    host: str | None = None
    vantage: Vantage = Vantage.GUEST
    vcpus: dict[str, int] = {}
    inferred_vcpus: tuple[str, ...] = ()
    pcie: str | None = None
    facts: dict[str, str] = {}
    unusable: str | None = None
    remedy: str | None = None


class Publication(Struct, frozen=True):
    """One document.

    runs: a run for each system and choice. figures: the same as printed. published: the date;
    is_date_inferred: the document itself does not print it.
    """

    id: str
    title: str
    publisher: str
    published: str
    is_date_inferred: bool
    choices: tuple[PublishedChoice, ...]
    systems: tuple[System, ...]
    runs: tuple[Run, ...]
    figures: tuple[PrintedFigure, ...]
    effects: tuple[PrintedEffect, ...]
    claims: tuple[Claim, ...]
    verdicts: tuple[PublishedVerdict, ...]
    notes: tuple[Note, ...]
    remarks: tuple[Remark, ...]
    field_reports: tuple[FieldReport, ...]
    derivations: tuple[Derivation, ...] = ()

    @property
    def dated(self) -> str:
        """When it was published; "inferred" where the document does not say."""
        return f"{self.published} (inferred)" if self.is_date_inferred else self.published

    def system(self, name: str) -> System | None:
        """The machine of that name, or None."""
        return next((one for one in self.systems if one.name == name), None)

    def choice(self, name: str) -> PublishedChoice | None:
        """The configuration of that name, or None."""
        return next((one for one in self.choices if one.name == name), None)


class Evidence(Struct, frozen=True):
    """All that is known. runs: imported results and own ones, of any machine."""

    publications: tuple[Publication, ...]
    runs: tuple[Run, ...] = ()
