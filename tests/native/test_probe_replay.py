"""The probe's judgement on recorded series: placement states, and levels of a latency curve."""

import random
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from tests.probe_build import probe

Row = tuple[float | str, ...]
Cache = tuple[float, float]
"""Capacity in bytes, latency in ns."""
NEAR, FAR, SIBLING = "near", "far", "sibling"
CAS_NS = {NEAR: (27.0, 33.0), FAR: (106.0, 118.0), SIBLING: (9.5, 11.0)}
LINKS = {NEAR: 1.0, FAR: 1.95, SIBLING: 1.0}


def replay(command: str, path: Path, rows: list[Row]) -> dict[str, Any]:
    path.write_text("".join(" ".join(str(cell) for cell in row) + "\n" for row in rows))
    return probe(command, "--replay", str(path)).document


def cas(rng: random.Random, state: str) -> float:
    return round(rng.uniform(*CAS_NS[state]), 2)


def recorded(rng: random.Random, states: list[tuple[str, str]]) -> list[Row]:
    """A series as the machine gave it: (state before, state after) of each bracket."""
    rows: list[Row] = []
    for before, after in states:
        one = rng.uniform(26.5e9, 28.5e9)
        both = one * LINKS[after] * rng.uniform(0.97, 1.03)
        rows.append((cas(rng, before), cas(rng, after), one, both))
    return rows


@pytest.mark.parametrize("seed", range(8))
def test_no_two_states_are_ever_pooled_and_every_transition_is_found(
    seed: int, tmp_path: Path
) -> None:
    rng = random.Random(seed)
    states: list[tuple[str, str]] = []
    moves: list[int] = []
    here = rng.choice([NEAR, FAR, SIBLING])
    for _ in range(rng.randint(2, 6)):
        states += [(here, here)] * rng.randint(2, 20)
        there = rng.choice([state for state in CAS_NS if state != here])
        moves.append(len(states))
        if rng.random() < 0.5:  # in the middle of a sample, else between two
            states.append((here, there))
        here = there
        states += [(here, here)] * 2
    document = replay("placement", tmp_path / "series", recorded(rng, states))
    assert document["transitions"] == moves
    assert document["verdict"] == "moves"
    truth_of_label: dict[int, set[str]] = {}
    for (before, after), look in zip(states, document["series"], strict=True):
        if before != after:
            assert look["state"] is None
            assert "changed during" in look["no_state"]
        else:
            truth_of_label.setdefault(look["state"], set()).add(before)
    assert None not in truth_of_label
    assert all(len(truths) == 1 for truths in truth_of_label.values()), truth_of_label
    assert len(truth_of_label) == len({state for pair in states for state in pair})


def test_one_steady_state_is_one_pool(tmp_path: Path) -> None:
    rng = random.Random(3)
    document = replay("placement", tmp_path / "s", recorded(rng, [(NEAR, NEAR)] * 50))
    assert document["verdict"] == "steady"
    assert [(state["samples"], state["pairs"][0]["link"]) for state in document["states"]] == [
        (50, "shared")
    ]


def test_the_fill_ratio_names_the_link_of_each_state(tmp_path: Path) -> None:
    rng = random.Random(4)
    states = [(NEAR, NEAR)] * 10 + [(FAR, FAR)] * 10
    document = replay("placement", tmp_path / "s", recorded(rng, states))
    links = {round(s["cas_median_ns"], -1): s["pairs"][0]["link"] for s in document["states"]}
    assert links == {30: "shared", 110: "apart"}


def test_a_bracket_that_was_not_measured_has_no_state(tmp_path: Path) -> None:
    rows: list[Row] = [(28, 29), ("-", 29), (28, "-"), (29, 28)]
    document = replay("placement", tmp_path / "s", rows)
    assert [look["state"] for look in document["series"]] == [0, None, None, 0]
    assert document["transitions"] == []


@pytest.mark.parametrize(
    "text",
    ["", "# only a comment\n", "1\n", "1 2 3 4 5\n", "1 x\n", "1 -2\n", "nan 1\n", "1 inf\n"],
)
def test_a_series_that_is_none_is_refused_with_its_line(text: str, tmp_path: Path) -> None:
    path = tmp_path / "series"
    path.write_text(text)
    answer = probe("placement", "--replay", str(path))
    assert answer.code == 2
    assert "expected" in answer.errors or "no lines of numbers" in answer.errors
    assert str(path) in answer.errors


KIB, MIB = 1024, 1024 * 1024


def curve(
    caches: list[Cache], dram_ns: float, most: int, *, half_steps: bool, noise: float
) -> list[Row]:
    """A curve of caches [(capacity in bytes, ns)], with soft knees and one-sided noise."""
    rng = random.Random(5)
    rows: list[Row] = []
    size = 4 * KIB
    sizes: list[int] = []
    while size <= most:
        sizes += [size, size * 3 // 2] if half_steps and size * 3 // 2 <= most else [size]
        size *= 2
    for one in sizes:
        latency, inside = 0.0, 0.0
        for capacity, ns in caches:  # the part of the lines that each cache holds
            owned = min(1.0, capacity / one)
            latency += max(owned - inside, 0.0) * ns
            inside = max(inside, owned)
        latency += (1.0 - inside) * dram_ns
        rows.append((one, round(latency * (1 + abs(rng.gauss(0, noise))), 4)))
    return rows


MACHINES: dict[str, tuple[list[Cache], float]] = {
    "zen4-ccd": ([(32 * KIB, 1.09), (1 * MIB, 3.85), (32 * MIB, 12.2)], 93.0),
    "zen4-v-cache": ([(32 * KIB, 1.0), (1 * MIB, 3.5), (96 * MIB, 13.0)], 90.0),
    "emerald-rapids": ([(48 * KIB, 1.3), (2 * MIB, 4.3), (260 * MIB, 33.0)], 120.0),
    "no-llc": ([(32 * KIB, 1.2), (512 * KIB, 6.0)], 110.0),
    "four-caches": ([(32 * KIB, 1.0), (256 * KIB, 3.4), (8 * MIB, 12.0), (128 * MIB, 42.0)], 95.0),
}


@pytest.mark.parametrize("name", MACHINES)
@pytest.mark.parametrize("half_steps", [False, True])
@pytest.mark.parametrize("noise", [0.0, 0.02])
def test_levels_are_found_from_the_curve(
    name: str, half_steps: bool, noise: float, tmp_path: Path
) -> None:
    caches, dram_ns = MACHINES[name]
    rows = curve(caches, dram_ns, 4096 * MIB, half_steps=half_steps, noise=noise)
    levels = replay("latency", tmp_path / "curve", rows)["levels"]
    assert (levels[0]["level"], levels[-1]["level"]) == ("L1", "DRAM")
    assert len(levels) == len(caches) + 1
    for level, (capacity, ns) in zip(levels, caches, strict=False):
        assert level["latency_ns"] == pytest.approx(ns, rel=0.12)
        assert capacity / 2 <= level["capacity_bytes"] <= capacity * 2
    assert levels[-1]["latency_ns"] == pytest.approx(dram_ns, rel=0.12)
    assert levels[-1]["capacity_bytes"] is None
    assert all(low["latency_ns"] < high["latency_ns"] for low, high in pairwise(levels))


def test_a_curve_that_still_climbs_at_its_end_has_no_dram(tmp_path: Path) -> None:
    caches, dram_ns = MACHINES["emerald-rapids"]
    rows = curve(caches, dram_ns, 512 * MIB, half_steps=False, noise=0.0)
    document = replay("latency", tmp_path / "curve", rows)
    assert document["levels"][-1]["level"] == "LLC"
    assert document["llc_bytes_measured"] is None


def test_one_disturbed_point_makes_no_level(tmp_path: Path) -> None:
    caches, dram_ns = MACHINES["zen4-ccd"]
    rows = curve(caches, dram_ns, 512 * MIB, half_steps=True, noise=0.0)
    disturbed: list[Row] = [
        (size, float(ns) * (3 if size in (128 * KIB, 128 * MIB) else 1)) for size, ns in rows
    ]
    assert (
        replay("latency", tmp_path / "a", rows)["levels"]
        == replay("latency", tmp_path / "b", disturbed)["levels"]
    )


def test_sizes_that_do_not_ascend_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "curve"
    path.write_text("8192 1.0\n4096 1.0\n")
    answer = probe("latency", "--replay", str(path))
    assert answer.code == 2
    assert "ascending" in answer.errors
