"""The published figures of demo/published, as anybody reads results."""

from pathlib import Path

from homenode.measure.results.model import Run
from homenode.measure.results.store import load_runs

DIRECTORY = Path(__file__).parents[1] / "demo" / "published"
PUBLISHED_RUNS = load_runs(DIRECTORY).runs


def runs_of(system: str) -> list[Run]:
    """The runs of a machine, by the name in its document."""
    return [run for run in PUBLISHED_RUNS if run.head.system == system]
