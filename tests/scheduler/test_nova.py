"""The weigher and the filter that nova-scheduler loads.

Needs a Python with Nova from PyPI: HOMENODE_NOVA_PYTHON names it. homenode's own libraries come
from this Python.
"""

import os
import subprocess
from pathlib import Path
from typing import Any

import msgspec
import pytest
from msgspec import json

from homenode.cluster.scheduler import nova
from homenode.cluster.scheduler.nova import NovaCellSize, NovaHosts
from tests.doc_pages import ROOT

PROGRAM = Path(__file__).parent / "programs" / "nova_stream.py"
LIBRARIES = str(Path(msgspec.__file__).parents[1])


def stream(*words: str) -> dict[str, Any]:
    """What came of the program's stream. Nova's own libraries are found before ours."""
    python = os.environ.get("HOMENODE_NOVA_PYTHON")
    if not python:
        pytest.skip("HOMENODE_NOVA_PYTHON names no Python with Nova")
    start = "import runpy, sys; sys.path.append(sys.argv.pop(1)); sys.argv.pop(0); "
    start += "runpy.run_path(sys.argv[0], run_name='__main__')"
    done = subprocess.run(
        [python, "-c", start, LIBRARIES, str(PROGRAM), *words],
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
        env={**os.environ, "PYTHONPATH": str(ROOT / "src")},
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return json.decode(done.stdout.splitlines()[-1])  # type: ignore[no-any-return]


@pytest.mark.nova
def test_novas_scheduler_refuses_and_crosses_less_with_it() -> None:
    """The same requests; Nova's HostManager loads both classes by their names."""
    stock, ours, kept = (stream(name, "70", "4", "1") for name in ("stock", "homenode", "filter"))
    assert "HomenodeWeigher" in ours["weighers"]
    assert "HomenodeFilter" in ours["filters"]
    assert ours["refused"] <= stock["refused"]
    assert ours["crossed"] < stock["crossed"]
    assert ours["stranded"] < stock["stranded"]
    assert kept["crossed"] == 0, "the filter leaves out hosts where a VM would cross sockets"


def test_names_of_other_classes_are_not_there() -> None:
    with pytest.raises(AttributeError):
        _ = nova.HomenodeOther


SIZES = tuple(
    NovaCellSize(id=node, socket=node, cores=48, threads=2, memory_mib=1 << 20, gpus=4)
    for node in (0, 1)
)


def test_a_vm_costs_least_where_gpus_are_in_use_already() -> None:
    hosts = NovaHosts()
    one = {0: (6, 100 << 10, 1)}
    fresh = hosts._cost(SIZES, {}, one)
    begun = hosts._cost(SIZES, {0: (6, 100 << 10, 1)}, one)
    last = hosts._cost(SIZES, {0: (18, 300 << 10, 3)}, one)
    apart = hosts._cost(SIZES, {0: (6, 100 << 10, 1)}, {0: (12, 200 << 10, 1), 1: (0, 0, 1)})
    assert last < begun < fresh < apart
