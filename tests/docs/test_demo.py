"""The demonstration that the README begins with."""

from pathlib import Path

from demo import run

from homenode.vm.layout import PRESETS


def test_plans_every_preset_on_both_machines(tmp_path: Path) -> None:
    assert run.main(tmp_path) == 0
    for name, _, _ in run.MACHINES:
        tuned = {path.stem for path in (tmp_path / name).glob("*.xml")}
        assert tuned == set(PRESETS)
        assert (tmp_path / name / f"{run.DRAWN}.svg").read_text().startswith("<svg")
    assert (tmp_path / run.REPORT).stat().st_size > 100_000
