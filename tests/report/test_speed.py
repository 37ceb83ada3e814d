"""The report of a thousand runs: seconds of a processor, and memory."""

import re
import sys
from pathlib import Path

import pytest

from homenode.process import run

PROGRAM = Path(__file__).parents[2] / "bench/report_speed.py"
MOST_SECONDS, MOST_MIB = 9.0, 450
"""5.2 s and 399 MiB here; of a processor, so that neighbours do not count."""


@pytest.mark.lab
def test_a_thousand_runs_take_nine_seconds_and_450_mebibytes_at_most() -> None:
    printed = run((sys.executable, str(PROGRAM), "1000"), timeout_s=600).stdout
    found = re.search(r"\(([\d.]+) s of a processor\), at most (\d+) MiB", printed)
    assert found is not None, printed
    assert float(found[1]) <= MOST_SECONDS
    assert int(found[2]) <= MOST_MIB
