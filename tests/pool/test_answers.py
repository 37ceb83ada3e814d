"""What a pool's folder keeps of what was worked out: the same answers, without planning."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from homenode.check.verify.boot.guest_files import cache_folder
from homenode.cluster.pool.answers import MOST_ANSWERS, Answers, StoredAnswers
from homenode.cluster.pool.answers_file import (
    ANSWERS_FILE,
    KEY_FILE,
    read_answers,
    write_answers,
)
from homenode.cluster.pool.flavour import default_flavours
from homenode.cluster.pool.outlook import PoolOutlook, outlook
from homenode.cluster.pool.planner import Planner
from homenode.cluster.pool.sources import load_pool
from homenode.cluster.pool.stored import POOL_FILE, encode_pool
from homenode.units import GIB
from tests.pool.pools import filled, pool_of, shipped, with_free_memory

ON_EMPTY = len(default_flavours()) + 1
"""How often the planner is asked to know what fits on the one kind of host when it is empty: four
GPUs are on several nodes there, so that it is asked for any four as well."""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    host = shipped("hgx-a100-80gb")  # with eight nodes, where little is certain without planning
    pool = pool_of([(f"h{i}", filled(host, i)) for i in range(6)])
    frees = [[(30 + 15 * i) * GIB for _ in host.nodes] for i in range(6)]
    content = "".join(encode_pool(with_free_memory(pool, frees)))
    (tmp_path / POOL_FILE).write_text(content)
    return tmp_path


def _outlook(folder: Path) -> tuple[PoolOutlook, int]:
    """What fits, and how often the planner was asked."""
    pool = load_pool([str(folder)])
    answers = read_answers(folder)
    planner = Planner(pool, answers)
    found = outlook(pool, default_flavours(), planner)
    write_answers(folder, answers)
    return found, planner.asked


def test_the_second_command_has_the_same_answers_and_plans_the_empty_host_alone(
    folder: Path,
) -> None:
    pool = load_pool([str(folder)])
    first, asked = _outlook(folder)
    assert first == outlook(pool, default_flavours())
    assert asked > 2 * ON_EMPTY
    assert _outlook(folder) == (first, ON_EMPTY)
    assert (folder / ANSWERS_FILE).stat().st_mode & 0o77 == 0


def test_a_host_that_has_changed_is_planned_again(folder: Path) -> None:
    _, asked = _outlook(folder)
    text = (folder / POOL_FILE).read_text().splitlines()
    changed = json.loads(text[-1])
    changed["host"]["nodes"][0]["memory_free_bytes"] = 63 * GIB
    (folder / POOL_FILE).write_text("\n".join([*text[:-1], json.dumps(changed)]) + "\n")
    found, again = _outlook(folder)
    assert 0 < again < asked
    assert found == outlook(load_pool([str(folder)]), default_flavours())


def test_a_file_that_is_damaged_newer_or_altered_counts_as_none(folder: Path) -> None:
    first, asked = _outlook(folder)
    path = folder / ANSWERS_FILE
    text, seal = path.read_text().splitlines()
    stored = json.loads(text)
    altered = [
        json.dumps(stored | {number: dict.fromkeys(stored[number], (3, 3))})
        for number in ("counts", "stranded")
    ]
    newer = '{"format": "homenode.pool-answers/99"}'
    other_seal = seal[:-1] + ("0" if seal[-1] != "0" else "1")
    for content in (
        *("", "{", "[]", newer),
        *(f"{one}\n{seal}\n" for one in altered),
        f"{text}\n{other_seal}\n",
    ):
        path.write_text(content)
        assert _outlook(folder) == (first, asked), content[:40]
    assert _outlook(folder) == (first, ON_EMPTY)
    (cache_folder() / KEY_FILE).write_bytes(bytes(32))  # as of another user
    assert _outlook(folder) == (first, asked)


def test_what_another_program_has_worked_out_is_not_used(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, asked = _outlook(folder)
    monkeypatch.setattr("homenode.__version__", "0.0.0")
    assert _outlook(folder) == (first, asked)
    assert _outlook(folder) == (first, ON_EMPTY)


@pytest.mark.root
def test_a_folder_of_another_user_is_left_as_it_is(folder: Path) -> None:
    os.chown(folder, 65534, 65534)
    _outlook(folder)
    assert not (folder / ANSWERS_FILE).exists()


def test_answers_that_no_host_needs_are_left_out_of_a_file_that_is_too_large() -> None:
    old = {str(number): (1, 1) for number in range(MOST_ANSWERS + 1)}
    answers = Answers(StoredAnswers(program="p", counts=old))
    host = shipped("hgx-h100")
    pool = pool_of([("h", host)])
    found = outlook(pool, default_flavours(), Planner(pool, answers))
    assert found.hosts[0].fits[0].local == 8
    kept = answers.to_store()
    assert len(answers.stored.counts) > len(kept.counts) > 0
    assert "0" not in kept.counts
    assert kept.stranded == answers.stored.stranded != {}


def test_pool_show_writes_them_into_the_folder_of_a_captured_pool(folder: Path) -> None:
    run = [sys.executable, "-m", "homenode", "pool", "show", str(folder), "--json"]
    first = subprocess.run(run, capture_output=True, check=True).stdout
    assert (folder / ANSWERS_FILE).exists()
    assert subprocess.run(run, capture_output=True, check=True).stdout == first
