"""The Containerfile built by podman, and what a user does in it.

HOMENODE_CONTAINER_BASE names a local image to build on where docker.io is out of reach; how
podman builds and runs is the environment's (CONTAINERS_CONF, BUILDAH_ISOLATION).
"""

import json
import os
import shutil
import subprocess
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from homenode.measure.results.store import read_run
from tests.packaging.wheels import instructions

pytestmark = pytest.mark.lab

ROOT = Path(__file__).parents[2]
BASE = os.environ.get("HOMENODE_CONTAINER_BASE", dict(instructions())["ARG"].removeprefix("BASE="))
MAX_BYTES = 120_000_000
"""Above the base; 92 MB when this was written."""


def podman(*argv: str, timeout_s: float = 300) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["podman", *argv], capture_output=True, text=True, check=False, timeout=timeout_s
    )


@pytest.fixture(scope="module")
def image() -> Iterator[str]:
    if shutil.which("podman") is None:
        pytest.skip("podman is not installed")
    if podman("image", "exists", BASE).returncode != 0:
        pytest.skip(f"podman has no image {BASE}: pull it, or name one: HOMENODE_CONTAINER_BASE")
    name = f"localhost/homenode-test:{uuid.uuid4().hex}"
    file = str(ROOT / "containers" / "Containerfile")
    built = podman(
        "build",
        "--no-cache",
        "--layers=false",
        "-f",
        file,
        "-t",
        name,
        "--build-arg",
        f"BASE={BASE}",
        str(ROOT),
        timeout_s=1800,
    )
    assert built.returncode == 0, built.stdout[-3000:] + built.stderr[-3000:]
    yield name
    podman("rmi", "--force", name)


@pytest.fixture
def results(tmp_path: Path) -> Path:
    directory = tmp_path / "results"
    directory.mkdir()
    return directory


def ran(image: str, results: Path, *argv: str) -> subprocess.CompletedProcess[str]:
    mount = f"{results}:/results:U"
    return podman("run", "--rm", "--cap-add", "SYS_NICE", "-v", mount, image, *argv)


def test_it_holds_the_programs_and_nothing_to_build_with(image: str, results: Path) -> None:
    done = ran(image, results, "homenode", "--help")
    assert done.returncode == 0, done.stderr
    assert "bench" in done.stdout
    script = "for one in pip c++ make; do command -v $one /opt/homenode/bin/$one; done; true"
    assert ran(image, results, "sh", "-c", script).stdout == ""


def test_it_does_not_run_as_root(image: str, results: Path) -> None:
    assert ran(image, results, "id", "-u").stdout == "1001\n"


def test_it_adds_little_to_its_base(image: str) -> None:
    sizes = [
        int(podman("image", "inspect", "--format", "{{.Size}}", one).stdout)
        for one in (image, BASE)
    ]
    assert sizes[0] - sizes[1] < MAX_BYTES


def test_a_capture_made_in_it_is_read_outside_its_engine(image: str, results: Path) -> None:
    done = ran(image, results, "homenode", "capture", "-o", "/results/host.tar.gz")
    assert done.returncode == 0, done.stderr
    shown = ran(image, results, "homenode", "show", "--host", "/results/host.tar.gz", "--json")
    assert shown.returncode == 0, shown.stderr
    assert json.loads(shown.stdout)["summary"]["pus"] > 0
    assert (results / "host.tar.gz").stat().st_size > 0


def test_the_static_probe_needs_nothing_of_it(image: str, results: Path) -> None:
    copied = ran(
        image, results, "cp", "-L", "/usr/local/bin/homenode-probe-static", "/results/probe"
    )
    assert copied.returncode == 0, copied.stderr
    argv = ("/results/probe", "bandwidth", "--seconds", "0.1")
    inside = ran(image, results, *argv)
    assert json.loads(inside.stdout)["format"] == "homenode.probe/1"
    outside = subprocess.run(
        [results / "probe", "--version"], capture_output=True, text=True, check=True
    )
    assert outside.stdout.startswith("homenode-probe ")


def test_a_run_lands_in_the_mounted_directory(image: str, results: Path) -> None:
    argv = "homenode bench --name boxed --quick --repeat 1 --tests cpu-single".split()
    done = ran(image, results, *argv)
    assert done.returncode in (0, 1), done.stderr
    run = read_run(results / "cpu-only" / "boxed" / "results.jsonl")
    assert run.samples


def test_a_container_that_is_not_the_planned_guest_is_not_measured(
    image: str, results: Path
) -> None:
    shutil.copy(ROOT / "demo" / "gpu-vm.xml", results)
    plan = ("homenode", "plan", "/results/gpu-vm.xml", "--host", "hgx-h100", "--gpus", "8")
    planned = ran(
        image, results, *plan, "--layout", "pin-numa-pci", "--save-plan", "/results/plan.json"
    )
    assert planned.returncode == 0, planned.stderr
    done = ran(
        image, results, "homenode", "bench", "--name", "other", "--plan", "/results/plan.json"
    )
    assert done.returncode == 1, done.stdout + done.stderr
    assert "this guest is not the plan's" in done.stderr
    assert not (results / "cpu-only").exists()
