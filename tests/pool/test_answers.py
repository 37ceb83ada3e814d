"""What a pool's folder keeps of what was worked out: the same answers, without planning."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from homenode.cluster.pool.answers import MOST_ANSWERS, Answers, StoredAnswers
from homenode.cluster.pool.answers_file import ANSWERS_FILE, read_answers, write_answers
from homenode.cluster.pool.flavour import default_flavours
from homenode.cluster.pool.outlook import PoolOutlook, outlook
from homenode.cluster.pool.planner import Planner
from homenode.cluster.pool.sources import POOL_FILE, load_pool
from homenode.cluster.pool.stored import encode_pool
from homenode.units import GIB
from tests.pool.pools import filled, pool_of, shipped, with_free_memory


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    host = shipped("hgx-h100")
    pool = pool_of([(f"h{i}", filled(host, i)) for i in range(6)])
    frees = [[(200 + 150 * i) * GIB for _ in host.nodes] for i in range(6)]
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


def test_the_second_command_has_the_same_answers_and_plans_nothing(folder: Path) -> None:
    pool = load_pool([str(folder)])
    first, asked = _outlook(folder)
    assert first == outlook(pool, default_flavours())
    assert asked > 20
    assert _outlook(folder) == (first, 0)
    assert (folder / ANSWERS_FILE).stat().st_mode & 0o77 == 0


def test_a_host_that_has_changed_is_planned_again(folder: Path) -> None:
    _, asked = _outlook(folder)
    text = (folder / POOL_FILE).read_text().splitlines()
    changed = json.loads(text[-1])
    changed["host"]["nodes"][0]["memory_free_bytes"] = 123 * GIB
    (folder / POOL_FILE).write_text("\n".join([*text[:-1], json.dumps(changed)]) + "\n")
    found, again = _outlook(folder)
    assert 0 < again < asked
    assert found == outlook(load_pool([str(folder)]), default_flavours())


@pytest.mark.parametrize("content", ["", "{", "[]", '{"format": "homenode.pool-answers/99"}'])
def test_a_file_that_is_damaged_or_newer_counts_as_none(folder: Path, content: str) -> None:
    first, asked = _outlook(folder)
    (folder / ANSWERS_FILE).write_text(content)
    assert _outlook(folder) == (first, asked)
    assert _outlook(folder) == (first, 0)


def test_answers_for_another_number_of_nodes_are_not_used(folder: Path) -> None:
    first, asked = _outlook(folder)
    path = folder / ANSWERS_FILE
    stored = json.loads(path.read_text())
    runs = {digest: [*run[:3], []] for digest, run in stored["runs"].items()}
    path.write_text(json.dumps({**stored, "runs": runs, "counts": {}, "stranded": {}}))
    assert _outlook(folder) == (first, asked)


@pytest.mark.parametrize("gpu", ["x", "0000:ff:00.0"])
def test_stranded_gpus_that_are_not_free_ones_are_looked_for_again(folder: Path, gpu: str) -> None:
    first, _ = _outlook(folder)
    path = folder / ANSWERS_FILE
    stored = json.loads(path.read_text())
    stranded = {digest: [["cores", [gpu]]] for digest in stored["stranded"]}
    path.write_text(json.dumps({**stored, "stranded": stranded}))
    assert _outlook(folder)[0] == first


def test_what_another_program_has_worked_out_is_not_used(folder: Path) -> None:
    first, asked = _outlook(folder)
    path = folder / ANSWERS_FILE
    stored = json.loads(path.read_text())
    path.write_text(json.dumps({**stored, "program": "0.0.0"}))
    assert _outlook(folder) == (first, asked)


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
    assert not kept.counts
    assert len(kept.runs) == len(answers.stored.runs) > 0


def test_pool_show_writes_them_into_the_folder_of_a_captured_pool(folder: Path) -> None:
    run = [sys.executable, "-m", "homenode", "pool", "show", str(folder), "--json"]
    first = subprocess.run(run, capture_output=True, check=True).stdout
    assert (folder / ANSWERS_FILE).exists()
    assert subprocess.run(run, capture_output=True, check=True).stdout == first
