"""Which parts of make nightly a slice runs first, and that its time ends it."""

import time
from pathlib import Path

from tests.nightly import PARTS, ROOMS, choose_parts, run


def test_parts_of_changed_rooms_come_first_and_no_part_is_lost() -> None:
    parts = choose_parts(["src/homenode/change/journal.py", "README.md"], day=2)
    assert parts[0] == "kills"
    assert sorted(parts) == sorted(PARTS) == sorted(ROOMS)


def test_without_a_change_another_part_is_first_each_day() -> None:
    assert {choose_parts([], day)[0] for day in range(len(PARTS))} == set(PARTS)


def test_a_command_is_ended_by_its_time_and_is_no_failure(capfd: object) -> None:
    before = time.monotonic()
    assert run("python -c 'import time; time.sleep(60)'", seed=1, limit_s=0.2) == 0
    assert time.monotonic() - before < 30
    assert run("python -c 'raise SystemExit(3)'", seed=1) == 3


def test_a_failure_before_the_time_ends_is_one(tmp_path: Path) -> None:
    path = tmp_path / "test_failing.py"
    path.write_text(
        "import time\n\ndef test_a():\n    assert False\n\ndef test_b():\n    time.sleep(60)\n"
    )
    assert run(f"python -m pytest -p no:cacheprovider {path}", seed=1, limit_s=120) == 1
