"""A real Slurm whose nodes have whole GPUs and MIG slices: its files, its jobs and a study."""

import json
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.command_line import homenode
from tests.slurm import testbed
from tests.slurm.test_study_live import HERE, HOST, NEW, ended, equip, report, start

pytestmark = [pytest.mark.slurm, pytest.mark.nightly]

NODE = str(HERE / "gpu-node.toml")
GRES = """\
AutoDetect=off
NodeName={names} Name=gpu Type=h100 File={base}/gpu/gpu[0-2] Cores=0-15
NodeName={names} Name=gpu Type=h100 File={base}/gpu/gpu[4-6] Cores=16-31
""" + "".join(
    f"NodeName={{names}} Name=gpu Type=1g.10gb MultipleFiles={{base}}/gpu/gpu{gpu},"
    f"{{base}}/gpu/cap{gpu}{part} Cores={cores}\n"
    for gpu, cores in ((3, "0-15"), (7, "16-31"))
    for part in (1, 2)
)
GPUS = "0 1 2 4 5 6 3 3 7 7"
"""The GPU of each device, in Slurm's numbers."""


@pytest.fixture(scope="module")
def slurm() -> Iterator[testbed.Testbed]:
    """GPUs 3 and 7 are two slices each."""
    node = testbed._NODE.replace("gpu:h100:8", "gpu:h100:6,gpu:1g.10gb:4")
    with pytest.MonkeyPatch.context() as patch, tempfile.TemporaryDirectory() as directory:
        patch.setattr(testbed, "_NODE", node)
        patch.setattr(testbed, "_GRES", GRES)
        Path(directory).chmod(0o755)
        with testbed.running(Path(directory) / "slurm") as running:
            equip(running)
            running.environment["STAND_IN_GPUS"] = GPUS
            yield running


def test_slices_are_counted_and_jobs_not_judged(slurm: testbed.Testbed, tmp_path: Path) -> None:
    gres = tmp_path / "gres.conf"  # which GPU a line means is known by its file's name
    text = (slurm.base / "gres.conf").read_text()
    gres.write_text(text.replace(f"{slurm.base}/gpu/gpu", "/dev/nvidia"))
    words = (str(gres), str(slurm.base / "slurm.conf"), "--host", NODE, "--json")
    found = json.loads(homenode("slurm", "check", *words, whole=True).stdout)["findings"]
    of_lines = {(f["id"], f["severity"]) for f in found if f["id"].startswith("gres-c")}
    assert not of_lines and "gres-unjudged" in {f["id"] for f in found}
    for kind in ("h100:1", "1g.10gb:2"):
        job = testbed.submit(slurm, "-w", "gpu01", "-n1", "-c2", f"--gres=gpu:{kind}")
        testbed.until_runs(slurm, job)
    conf = {"SLURM_CONF": slurm.environment["SLURM_CONF"]}
    for options in ((), ("--gres", str(gres))):
        words = ("slurm", "audit", "--host", NODE, "--json", *options)
        done = homenode(*words, env=conf, whole=True)
        found = json.loads(done.stdout)["findings"]
        assert [f["id"] for f in found] == ["job-unjudged"] * len(found) and found
    slurm.client("scancel", "-u", "root")


def test_a_study_measures_slices_beside_whole_gpus(slurm: testbed.Testbed, tmp_path: Path) -> None:
    directory = tmp_path / "study"
    options = "--nodes 1 --mig gpu:1g.10gb --shared 1x2 --tests none".split()
    code, said = ended(start(slurm, directory, *NEW[:4], *HOST, *options), directory)
    assert code == 0, said
    assert "9 of 9 jobs have results" in said
    found = report(slurm, directory)
    compared = {name for one in found["comparisons"] for name in one["alternatives"]}
    assert {"slice gpu:1g.10gb, alone", "slice gpu:1g.10gb, together"} <= compared
    met = [job["met"] for job in found["jobs"] if "slice" in job["name"] and job["met"]]
    assert met == ["4 of 4"] * 4
