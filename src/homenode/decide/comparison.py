"""Comparison: effects with intervals, or "cannot tell", and every doubt with its remedy."""

from collections.abc import Iterable, Mapping
from enum import StrEnum

from msgspec import Struct, toml
from msgspec.structs import replace

from homenode.findings import Doubt
from homenode.measure.results.model import FigureKey
from homenode.measure.results.sweep import SweepFit
from homenode.package_data import package_text


class Outcome(StrEnum):
    """What a comparison says of one metric."""

    BETTER = "better"
    WORSE = "worse"
    NO_DIFFERENCE = "no-difference"  # none that matters: the whole interval is within what does not
    CANNOT_TELL = "cannot-tell"


class EvidenceLevel(StrEnum):
    """How strong the evidence for an answer is, the strongest first."""

    MEASURED = "measured"  # intervals over three boots or more of each
    NO_DIFFERENCE = "no-difference"  # the same, and they exclude a difference that matters
    PROVISIONAL = "provisional"  # fewer boots, printed values, or an order that drift can explain:
    # only where the difference is far beyond what boots of one layout have differed by
    RULE = "rule"  # of plan/auto: no result shows a difference, nor that there is none

    @property
    def rank(self) -> int:
        """0 for the strongest."""
        return list(EvidenceLevel).index(self)


FEW_BOOTS, PRINTED, ORDER, NO_ORDER, STATES = (
    "few-boots",
    "published-figures",
    "blocked-order",
    "unknown-order",
    "boots-apart",
)
WEAKENING = frozenset({FEW_BOOTS, PRINTED, ORDER, NO_ORDER})
"""Doubts that leave no interval to trust, but differences far beyond any between boots."""

SLOW_IN_ONE, NODELESS = "slow-in-one-layout", "gpus-without-node"


class DoubtTexts(Struct, frozen=True, forbid_unknown_fields=True):
    """What is said of each doubt of an id, unless a call says something else."""

    blocks: bool
    cause: str = ""
    remedy: str = ""


_TEXTS = toml.decode(package_text("decide", "doubts.toml"), type=dict[str, DoubtTexts])


def make_doubt(
    id: str,
    subject: str,
    detail: str,
    *,
    blocks: bool | None = None,
    cause: str | None = None,
    remedy: str | None = None,
) -> Doubt:
    """A doubt with the texts of its id, but for those that are given."""
    texts = _TEXTS.get(id) or DoubtTexts(blocks=False)
    return Doubt(
        id=id,
        subject=subject,
        detail=detail,
        blocks=texts.blocks if blocks is None else blocks,
        cause=texts.cause if cause is None else cause,
        remedy=texts.remedy if remedy is None else remedy,
    )


def once(doubts: Iterable[Doubt]) -> tuple[Doubt, ...]:
    """Doubts that say the same of several subjects, once, of all of them."""
    subjects: dict[Doubt, dict[str, None]] = {}
    for doubt in doubts:
        subjects.setdefault(replace(doubt, subject=""), {})[doubt.subject] = None
    return tuple(replace(doubt, subject="; ".join(named)) for doubt, named in subjects.items())


class Effect(FigureKey, frozen=True, kw_only=True, gc=False):
    """One series of one alternative against the same series of the baseline."""

    slowest_device: bool  # the slowest of several devices, boot by boot
    lower_is_better: bool
    primary: bool  # it decides for the objective; else it is exploratory
    baseline: str
    alternative: str
    baseline_value: float  # geometric means of boot medians
    value: float  # geometric means of boot medians
    ratio: float  # value over baseline_value
    low: float | None  # its interval, None where there is none
    high: float | None  # its interval, None where there is none
    # p, p_adjusted: uncorrected, and corrected for the primary metrics; None where there is no
    # interval, p_adjusted also for what is exploratory
    p: float | None
    p_adjusted: float | None
    boots: tuple[int, int]  # (baseline, other)
    samples: tuple[int, int]  # (baseline, other)
    level: EvidenceLevel
    outcome: Outcome
    doubts: tuple[str, ...]  # ids that block this one
    system: str = ""  # the machine, where several were compared, each with itself; else ""

    @property
    def gain(self) -> float:
        """How much better the alternative is, as a ratio above 1 whatever the direction."""
        return 1 / self.ratio if self.lower_is_better else self.ratio


class Comparison(Struct, frozen=True, kw_only=True):
    """The `comparison` format."""

    # whose primary metrics decide; None = those of every objective, each for itself
    objective: str | None
    bare: bool  # the baseline is the host itself, and ratios are parts of bare metal
    confidence: float  # of every interval
    baseline: str  # of the first machine; of others their effects name them
    alternatives: tuple[str, ...]  # of the first machine; of others their effects name them
    effects: tuple[Effect, ...]
    doubts: tuple[Doubt, ...]
    skipped: tuple[str, ...]  # folders that were omitted, with the reason
    power: Mapping[str, Mapping[str, float]] = {}  # median watts of a GPU, by alternative and test
    # of rates over sizes, by alternative and metric
    sweeps: Mapping[str, Mapping[str, SweepFit]] = {}
