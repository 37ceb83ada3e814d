"""What a study comes to: records of jobs, maps, queues, slow nodes, recommendations, power."""

import html
import io
import json
import random
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs
from msgspec.structs import replace

from homenode.bdf import Bdf
from homenode.cluster.slurm.job_allocation import node_machine
from homenode.cluster.slurm.study.directory import read_sources
from homenode.cluster.slurm.study.evidence import (
    AttemptRecord,
    JobEvidence,
    StudySources,
    build_evidence,
    parse_collective,
    parse_record,
)
from homenode.cluster.slurm.study.experiments import Experiment, NodeSharing
from homenode.cluster.slurm.study.locality import JobLocality
from homenode.cluster.slurm.study.maps import build_study_matrices
from homenode.cluster.slurm.study.report import (
    FAR,
    NEAR,
    RecommendedQueue,
    StudyReport,
    build_study_report,
    compare_jobs,
    convert_copies,
)
from homenode.cluster.slurm.study.text import (
    build_study_page,
    build_study_summary,
    format_effect_cells,
    format_slurm_study,
)
from homenode.cpuset import CpuSet
from homenode.decide.alternative import group_runs
from homenode.decide.compare import compare
from homenode.decide.comparison import Effect, Outcome
from homenode.doc import Doc, format_plain
from homenode.findings import Gap
from homenode.formats import encode
from homenode.measure.results.model import (
    CPU_ONLY,
    UNKNOWN_SWITCHES,
    Condition,
    Origin,
    Run,
    RunHead,
    Sample,
    Switches,
)
from homenode.measure.results.vantage import Vantage
from homenode.metrics import POWER
from homenode.show.html import render_page
from homenode.show.terminal_text import PrintableConsole
from homenode.vm.layout import PRESETS
from homenode.vm.sources import load_host
from tests import sdumont_study
from tests.command_line import homenode
from tests.explained import tables
from tests.sdumont_study import write_study
from tests.slurm.gpu_nodes import job_text

GPU_NODE = node_machine(load_host(str(Path(__file__).parent / "gpu-node.toml")))


def text_of(shown: StudyReport | Doc, width: int = 100) -> str:
    """The whole report of a study, or a document."""
    doc = shown if isinstance(shown, Doc) else format_slurm_study(shown)
    out = io.StringIO()
    PrintableConsole(file=out, width=width, color_system=None).print(doc)
    return "".join(f"{line.rstrip()}\n" for line in out.getvalue().splitlines())


def of_directory(directory: Path) -> StudyReport:
    found = read_sources([directory])
    return build_study_report("x", found)


@pytest.fixture
def gh200(tmp_path: Path) -> Path:
    write_study(tmp_path / "data/transfer")
    return tmp_path / "data"


def test_the_gh200_studys_files_give_its_table(gh200: Path) -> None:
    report = of_directory(gh200)
    by_metric = {one.metric: one for one in report.matrices}
    for metric, (local, remote), scale in (
        ("h2d-bandwidth", sdumont_study.H2D, 1e9),
        ("d2h-bandwidth", sdumont_study.D2H, 1e9),
        ("h2d-latency", sdumont_study.LATENCY_NS, 1.0),
    ):
        one = by_metric[metric]
        assert sum(cell is not None for row in one.cells for cell in row) == 16
        assert one.local == pytest.approx(local * scale)
        assert one.remote == pytest.approx(remote * scale)
    ratio = by_metric["h2d-bandwidth"].ratio
    assert ratio is not None
    assert f"{ratio:.2f}x" == "4.65x"
    copies, peers = report.comparisons
    far = next(e for e in copies.effects if e.alternative == FAR and e.metric == "h2d-bandwidth")
    assert (far.outcome, far.boots) == (Outcome.WORSE, (4, 4))
    assert peers.effects[0].baseline_value == pytest.approx(sdumont_study.GPU_TO_GPU * 1e9)


def test_the_gh200_studys_files_give_its_conclusions(gh200: Path) -> None:
    report = of_directory(gh200)
    queues = {one.work: (one.queue, one.measured) for one in report.recommendations}
    assert queues == {
        "memory-bound GPU codes": (RecommendedQueue.EXCLUSIVE, True),
        "compute-bound GPU codes": (RecommendedQueue.SHARED, False),
        "multi-GPU (NVLink)": (RecommendedQueue.EITHER, True),
        "development, testing": (RecommendedQueue.SHARED, False),
    }
    assert text_of(report).startswith(
        "x: exclusive for memory-bound GPU codes; either for multi-GPU\n"
    )
    shared = [job for job in report.jobs if job.mode is NodeSharing.TOGETHER]
    assert len(shared) == 6
    assert {job.locality for job in shared} == {JobLocality.OPEN}
    assert shared[0].reason == "its memory may be on nodes 0 1 2 3 4 12 20 28"
    homes = next(m for m in report.matrices if m.metric == "h2d-bandwidth")
    assert (homes.homes, homes.homes_measured) == ((0, 1, 2, 3), True)


def test_the_summary_has_a_row_for_each_kind_of_work_and_what_is_unknown(gh200: Path) -> None:
    report = structs.replace(of_directory(gh200), source="data")
    next_command = "homenode slurm report data --explain"
    summary = text_of(build_study_summary(report, next_command), 80)
    heads = {line[:10].strip() for line in summary.splitlines()[1:]} - {""}
    assert heads >= {"work", "memory-bou", "compute-bo", "multi-GPU", "developmen"}
    assert heads >= {"copies", "locality", "unknown", "next"}
    for fact in ("411.6 GB/s local, 88.6 GB/s remote: 4.65x", "0 of 6 that Slurm placed lost"):
        assert fact in summary
    assert summary.endswith(f"next      {next_command}\n")
    gap = Gap("n1", "its log is damaged")
    more = structs.replace(report, missing=("a", "b", "c"), gaps=(gap, gap), systems=("x", "y"))
    text = text_of(build_study_summary(more, next_command), 80)
    assert "missing   a; b and 1 more" in text and "n1: its log is damaged" in text
    assert len(summary.splitlines()) < len(text.splitlines()) <= 25


def test_imported_runs_agree(gh200: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert homenode("import", gh200, "-o", "runs", whole=True).exit_code == 0
    found = json.loads(homenode("slurm", "report", "runs", "--json", whole=True).stdout)
    done = homenode("report", "runs", "-o", "page.html", whole=True)
    assert "homenode slurm report recommends queues" in done.stderr
    assert (found["format"], done.exit_code) == ("homenode.slurm-report/1", 0)
    first = found["matrices"][0]
    assert first["local"] == pytest.approx(411.6e9)
    assert first["remote"] == pytest.approx(88.6e9)
    assert found["recommendations"][0]["queue"] == "exclusive"
    two = [job for job in found["jobs"] if "2gpu" in job["name"]]
    assert {job["reason"] for job in two} == {"the nodes of its CPUs are unknown"}
    pairs = {job["name"]: job["gpus"] for job in two}
    assert pairs == {"shared_array_2gpu, job 0": 2, "shared_array_2gpu, job 1": 2}


@pytest.mark.parametrize("width", [40, 80, 200])
def test_the_text_fits_any_terminal_and_marks_each_gpus_home(gh200: Path, width: int) -> None:
    text = text_of(of_directory(gh200), width)
    assert max(map(len, text.splitlines())) <= width
    assert "[412.0]" in text
    assert "(not measured)" in " ".join(text.split())
    assert "- :" not in text
    assert "GPU-hours not recorded" in " ".join(text.split())
    assert "4.65x" in text


SHARE = "CPU_IDs={ids} Mem=100 GRES=gpu:h100:{count}(IDX:{gpus})"
JOB = job_text(7, "11:00:00", "11:02:05", SHARE)
ALONE = Experiment("shared-6gpu-n1-alone", NodeSharing.ALONE, ("n1",), "parts", 6)


def run_of(name: str, *samples: Sample, **fields: object) -> Run:
    head = RunHead(name, "nvidia-h100", Origin.MEASURED, Vantage.JOB, UNKNOWN_SWITCHES)
    return Run(structs.replace(head, **fields), samples)


def judged(run: Run, texts: dict[str, str], *, known: bool = True) -> JobEvidence:
    host = GPU_NODE.host if known else None
    return build_evidence(ALONE, run, parse_record(texts, 6), host, GPU_NODE if known else None)


def test_a_job_away_from_its_gpus_by_slurms_word_has_lost_locality() -> None:
    texts = {"job.txt": JOB.format(ids="32-37", count=6, gpus="0-1,4-7")}
    locality, why = judged(run_of("a"), texts).locality
    assert locality is JobLocality.LOST
    assert "expected CPUs on node 0, where gpu0 (0000:11:00.0), gpu1 (0000:12:00.0) are" in why
    near = {"job.txt": JOB.format(ids="32-37", count=2, gpus="4-5")}
    assert judged(run_of("a"), near).locality[0] is JobLocality.KEPT
    assert judged(run_of("a"), near, known=False).locality[0] is JobLocality.UNKNOWN


def test_what_the_job_measured_itself_counts_before_slurms_word() -> None:
    # Slurm says socket 1 and GPU 4, which would be right.
    texts = {"job.txt": JOB.format(ids="32-33", count=1, gpus="4")}
    copy = Sample("h2d-bandwidth", "bytes_per_s", 50e9, device=Bdf.parse("81:00.0"))
    for nodes, expected in (((0, 1), JobLocality.OPEN), ((0,), JobLocality.LOST)):
        run = run_of("a", copy, pus=CpuSet([16, 17]), nodes=nodes)
        assert judged(run, texts).locality[0] is expected


DRIVER = ("answers", "silent", "absent", "old", "wrong")
"""Forms of the tool's device list: addresses, none, nothing measured, numbers alone, other GPUs."""


@pytest.mark.parametrize("driver", DRIVER)
@pytest.mark.parametrize("access", ["", "confined", "open to all"])
@pytest.mark.parametrize("gpus", [(4,), (0, 1), (0, 5)])
@pytest.mark.parametrize("cpu_node", [0, 1])
def test_the_locality_of_a_job_is_right_or_unknown(
    driver: str, access: str, gpus: tuple[int, ...], cpu_node: int
) -> None:
    devices = [gpu.bdf for gpu in GPU_NODE.gpus if gpu.bdf is not None]
    other = [(gpu + 4) % 8 for gpu in gpus]
    measured = {"answers": gpus, "wrong": other, "old": (None,) * len(gpus)}.get(driver, ())
    # nvidia-smi shows the power of every GPU of the node, whatever the job was given.
    samples = [Sample("gpu-power", "watts", 90.0, device=device) for device in devices]
    for n in measured:
        device = None if n is None else devices[n]
        samples.append(Sample("h2d-bandwidth", "bytes_per_s", 5e10, device=device))
    listed = ",".join(map(str, gpus))
    confined = ",".join(map(str, range(len(gpus))))
    names = confined if access == "confined" else listed
    opened = gpus if access == "confined" else range(8)
    lines = [f"slurm {listed}\nvisible {names}"]
    lines += [f"gpu {d} {'open' if n in opened else 'closed'}" for n, d in enumerate(devices)]
    ids = f"{32 * cpu_node}-{32 * cpu_node + 7}"
    texts = {
        "job.txt": JOB.format(ids=ids, count=len(gpus), gpus=listed),
        "gpus.txt": "\n".join(lines) if access else "",
    }
    pus = CpuSet.parse("16-19,48-51" if cpu_node else "0-3,32-35", "pus")
    run = run_of("a", *samples, pus=pus, nodes=(cpu_node,))
    is_near = {cpu_node} == {gpu // 4 for gpu in gpus}
    truth = JobLocality.KEPT if is_near else JobLocality.LOST
    locality, why = judged(run, texts).locality
    if driver == "wrong" and len({gpu // 4 for gpu in gpus}) == 1:
        assert locality is JobLocality.UNKNOWN
        assert f"the measuring tool shows {devices[other[0]]}" in why
    else:
        assert locality is truth


def test_a_job_of_which_nothing_shows_gpus_or_cpus_is_unknown() -> None:
    power = [Sample("gpu-power", "watts", 90.0, device=gpu.bdf) for gpu in GPU_NODE.gpus]
    silent = run_of("a", *power, pus=CpuSet.parse("0-3", "pus"), nodes=(0,))
    assert judged(silent, {}).locality[0] is JobLocality.UNKNOWN
    without_cpus = JOB.format(ids="", count=1, gpus="4").replace("CPU_IDs= ", "")
    found = judged(run_of("a"), {"job.txt": without_cpus})
    assert found.locality[0] is JobLocality.UNKNOWN
    wide = run_of("a", pus=CpuSet.parse("0-63", "pus"), nodes=(1,))
    texts = {"job.txt": JOB.format(ids="32-37", count=1, gpus="4")}
    assert judged(wide, texts).locality[0] is JobLocality.OPEN


def test_a_record_tells_waits_hours_and_neighbours() -> None:
    texts = {
        "job.txt": JOB.format(ids="0-3", count=2, gpus="0-1"),
        "others.txt": "7\n9\n9\n",
        "started": "1000\n",
        "ended": "2800\n",
        "met": "3 of 4\n",
        "squeue.err": "slow\nexit status 1\n",
    }
    record = parse_record(texts, 1)
    assert (record.queue_wait_s, record.gpu_hours) == (125.0, 1.0)
    assert (record.other_jobs, record.met) == (1, "3 of 4")
    assert [str(gap) for gap in record.gaps] == ["squeue: slow; exit status 1"]


@pytest.mark.parametrize(
    "texts",
    [
        {},
        {"job.txt": "slurm_load_jobs error: Invalid job id specified\n"},
        {"started": "x", "ended": "1", "others.txt": "\0" * 50, "met": "\x1b[31m of 9"},
    ],
)
def test_files_that_are_damaged_or_missing_are_gaps(texts: dict[str, str]) -> None:
    one = judged(run_of("a"), texts)
    assert one.node == "n1"
    report = build_study_report("x", StudySources(jobs=(one,), gaps=one.gaps))
    assert "a" in text_of(report)
    json.loads(encode("slurm-report", report))


def test_figures_of_a_stand_in_are_marked_in_every_output(tmp_path: Path) -> None:
    log = sdumont_study.exclusive(0)
    path = tmp_path / "exclusive_4gpu_node0.txt"
    path.write_text(log.replace("nvbandwidth V", "replayed: made up\nnvbandwidth V"))
    report = of_directory(tmp_path)
    assert json.loads(encode("slurm-report", report))["replayed"] == ["made up"]
    assert "REPLAYED: made up. GPU results here do not describe" in text_of(report)
    page = render_page(build_study_page(report, "now"))
    assert "REPLAYED: made up. GPU results here do not describe" in page
    said = (Condition("replayed", "made up"),)
    one = judged(run_of("a", origin=Origin.SYNTHESISED, conditions=said), {})
    assert one.replay_notice == "made up"
    path.write_text(log)
    assert "REPLAYED" not in text_of(of_directory(tmp_path))


def test_gpus_of_several_kinds_are_said_to_be_mixed(gh200: Path) -> None:
    assert of_directory(gh200).systems == ("nvidia-gh200-120gb",)
    assert "MIXED" not in text_of(of_directory(gh200))
    for log in (gh200 / "transfer").glob("shared_array_1gpu_*"):
        log.write_text(log.read_text().replace("GH200 120GB", "H100 PCIe"))
    mixed = of_directory(gh200)
    assert mixed.systems == ("nvidia-gh200-120gb", "nvidia-h100-pcie")
    assert "MIXED: GPUs of several kinds (nvidia-gh200-120gb, nvidia-h100-pcie)" in text_of(mixed)


def job(mode: NodeSharing, rate: float, **fields: object) -> JobEvidence:
    """samples, experiment, block: of its run."""
    gpu = Bdf.parse("11:00.0")
    copy = Sample("h2d-bandwidth", "bytes_per_s", rate, device=gpu, node=0)
    name = str(fields.get("name", f"{mode}-{rate:g}"))
    head = {key: fields.pop(key) for key in ("experiment", "block") if key in fields}
    samples: tuple[Sample, ...] = fields.pop("samples", (copy,))  # type: ignore[assignment]
    run = run_of(name, *samples, **head)
    near = {"cpu_nodes": (0,), "memory_nodes": (0,), "homes": ((str(gpu), 0),)}
    given: dict[str, Any] = {"name": name, **near, "run": run, "node": "n1", "gpus": 1, **fields}
    return JobEvidence(mode=mode, **given)


def reported(*jobs: JobEvidence) -> StudyReport:
    return build_study_report("x", StudySources(jobs=jobs))


@pytest.mark.parametrize(
    ("metric", "expected"),
    [("h2d-bandwidth", JobLocality.UNKNOWN), (POWER, JobLocality.KEPT)],  # power is of all GPUs
)
def test_without_a_home_the_locality_is_unknown(metric: str, expected: JobLocality) -> None:
    copies = [
        Sample(name, "bytes_per_s", 5e10, device=Bdf.parse(address), node=0)
        for name, address in (("h2d-bandwidth", "11:00.0"), (metric, "12:00.0"))
    ]
    assert job(NodeSharing.TOGETHER, 5e10, samples=tuple(copies)).locality[0] is expected


@pytest.mark.parametrize(
    ("shared", "memory", "expected"),
    [
        (50e9, (0,), RecommendedQueue.EITHER),  # near, bound, as fast
        (50e9, (0, 1), RecommendedQueue.EXCLUSIVE),  # nothing holds its memory
        (40e9, (0,), RecommendedQueue.EXCLUSIVE),  # slower
    ],
)
def test_shared_jobs_do_for_copies_where_they_are_near_bound_and_as_fast(
    shared: float, memory: tuple[int, ...], expected: RecommendedQueue
) -> None:
    together = job(NodeSharing.TOGETHER, shared, memory_nodes=memory)
    report = reported(job(NodeSharing.EXCLUSIVE, 50e9), together)
    assert report.recommendations[0].queue is expected


def test_nodes_whose_gpus_have_other_addresses_are_not_compared() -> None:
    jobs = [
        replace(job(NodeSharing.EXCLUSIVE, 5e10, samples=(copy,)), node=str(copy.device))
        for copy in (
            Sample("h2d-bandwidth", "bytes_per_s", 5e10, device=Bdf(0, bus, 0, 0), node=0)
            for bus in range(3)
        )
    ]
    shown = text_of(format_slurm_study(build_study_report("x", StudySources(jobs=tuple(jobs)))))
    assert "unknown: slow nodes" in shown and "no node is slower" not in shown


def test_power_is_shown_by_binding_with_the_energy_of_a_copy() -> None:
    gpu = Bdf.parse("11:00.0")
    copy = Sample("h2d-bandwidth", "bytes_per_s", 50e9, device=gpu)
    watts = Sample("gpu-power", "watts", 400.0, device=gpu, variant="gpu-bandwidth")
    together = job(NodeSharing.TOGETHER, 50e9, samples=(copy, watts))
    report = reported(together, job(NodeSharing.EXCLUSIVE, 50e9))
    expected = {"gpu-bandwidth": 400.0, "gpu-bandwidth, J/GB": pytest.approx(8.0)}
    assert report.power == {"1 GPU, together": expected}
    assert "8 J/GB" in text_of(report)


def test_slices_are_compared_with_whole_gpus_and_decide_nothing() -> None:
    jobs = (
        job(NodeSharing.EXCLUSIVE, 50e9),
        job(NodeSharing.TOGETHER, 50e9),
        job(NodeSharing.TOGETHER, 12e9, gres="gpu:1g.10gb"),
    )
    (one,) = compare_jobs(jobs)
    assert one.baseline == NEAR
    assert one.alternatives == ("1 GPU, together", "slice gpu:1g.10gb, together")
    report = reported(*jobs)
    assert "slice gpu:1g.10gb, together" in text_of(report)
    assert report.recommendations[0].queue is RecommendedQueue.EITHER


def test_jobs_that_did_not_measure_together_stand_apart() -> None:
    apart = job(NodeSharing.TOGETHER, 50e9, record=AttemptRecord(met="1 of 4"))
    assert apart.shape == "1 GPU, 1 of 4 together"
    assert replace(apart, record=AttemptRecord(met="4 of 4")).shape == "1 GPU, together"


def test_the_setup_names_machines_and_no_gpus_where_the_jobs_had_none() -> None:
    run = run_of("a", system=CPU_ONLY, host_kind="two nodes")
    setup = dict(reported(job(NodeSharing.ALONE, 1.0, run=run)).setup)
    assert setup["machine"] == "two nodes" and "GPU" not in setup


def test_the_own_programs_time_is_shown_in_seconds() -> None:
    took = (Sample("app-time:gmx", "ns", 42e9),)
    modes = (NodeSharing.ALONE, NodeSharing.TOGETHER)
    text = text_of(reported(*(job(mode, 1.0, samples=took) for mode in modes)))
    assert "42 s" in text and "1 GPU, alone" in text


def test_the_job_of_all_nodes_counts_its_gpu_hours() -> None:
    found = parse_collective({"started": "1000\n", "ended": "2800\n"}, gpus=24)
    assert found.gpu_hours == 12.0
    sources = StudySources(jobs=(job(NodeSharing.EXCLUSIVE, 50e9),), collective=found)
    assert "12.00 GPU-hours" in text_of(build_study_report("x", sources))


def test_a_home_is_not_guessed_where_no_node_is_clearly_faster() -> None:
    gpu = Bdf.parse("11:00.0")
    copies = (
        Sample("h2d-bandwidth", "bytes_per_s", rate, device=gpu, node=node)
        for node, rate in ((0, 50e9), (1, 48e9))
    )
    jobs = tuple(
        job(NodeSharing.EXCLUSIVE, copy.value, homes=(), name=str(copy.node), samples=(copy,))
        for copy in copies
    )
    (matrix,) = build_study_matrices(jobs)
    assert (matrix.homes, matrix.homes_measured) == ((None,), False)
    assert matrix.local is None
    assert list(compare_jobs(jobs)) == []


def test_a_directory_without_a_study_is_refused(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("nothing\n")
    done = homenode("slurm", "report", tmp_path, whole=True)
    assert done.exit_code == 2 and "no jobs of a study in it" in done.stderr
    (tmp_path / "exclusive_1gpu_node0.txt").write_text("nvbandwidth: not found\n")
    done = homenode("slurm", "report", tmp_path, whole=True)
    assert done.exit_code == 2 and "exclusive_1gpu_node0.txt: no result" in done.stderr
    (tmp_path / "exclusive_1gpu_node0.txt").write_text("\0")
    done = homenode("slurm", "report", tmp_path, whole=True)
    assert "exclusive_1gpu_node0.txt: binary" in done.stderr and "notes" not in done.stderr
    done = homenode("slurm", "report", f"{tmp_path}s", whole=True)
    assert done.exit_code == 2 and f"hint: homenode slurm report {tmp_path}\n" in done.stderr


def test_a_row_whose_interval_excludes_1_says_why_nothing_can_be_told(gh200: Path) -> None:
    report = of_directory(gh200)
    (first, *_) = (e for c in report.comparisons for e in c.effects)
    effect = structs.replace(first, outcome=Outcome.CANNOT_TELL, low=0.5, high=0.76, ratio=0.62)
    unusable = structs.replace(effect, caveats=("unusable",))
    assert format_effect_cells(unusable)[1].endswith(": unusable")
    assert format_effect_cells(structs.replace(unusable, high=1.1))[1].endswith("tell")
    assert "several" in format_effect_cells(structs.replace(effect, caveats=()))[1]


def test_the_report_is_a_page_of_its_own(gh200: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(gh200.parent)
    done = homenode("slurm", "report", "data", "-o", "study.html", whole=True)
    assert (done.exit_code, done.stdout, done.stderr) == (0, "", "wrote study.html\n")
    page = Path("study.html").read_text()
    shown = html.unescape(re.sub(r"<[^>]*>", "", page)).replace("\u00a0", " ")
    every = format_slurm_study(structs.replace(of_directory(gh200), source="data"))
    cells = {format_plain(cell) for one in tables(every.parts) for row in one.rows for cell in row}
    assert "[412.0]" in cells
    assert not [cell for cell in cells if cell not in shown]
    assert page.count("<title>Slurm study data</title>") == 1
    assert not re.search(r"(src|href)=\"[^#]|url\((?!#)|@import", page), "nothing is loaded"
    for words in (["-o", "x.txt"], ["-o", "x.html", "--json"], ["-o", "nowhere/x.html"]):
        done = homenode("slurm", "report", "data", *words, whole=True)
        assert done.exit_code in (2, 3) and done.stderr


def test_what_files_say_is_no_markup_of_the_page(gh200: Path) -> None:
    hostile = "<script>TITLE {x} <p>MADE</p>\x1b[31m"
    found = structs.replace(of_directory(gh200), source=hostile, missing=("<b>job</b>",))
    page = render_page(build_study_page(found, "then & there"))
    assert page.count("<script") == 1 and "<b>" not in page and "\x1b" not in page
    assert "{x}" in page and "&lt;b&gt;job&lt;/b&gt;" in page
    assert page.count("then &amp; there</footer>") == 1 and page.count("&lt;p&gt;MADE") == 2


def _effect(first: Sequence[Run], second: Sequence[Run]) -> Effect:
    effects = compare(group_runs([*first, *second])).effects
    (found,) = [one for one in effects if one.slowest_device]
    return found


def test_a_study_of_bindings_has_the_intervals_of_a_trial_of_layouts() -> None:
    """The same simulated boots, once as jobs of two bindings and once as boots of two layouts."""
    rng = random.Random(20261122)
    gpu = Bdf.parse("11:00.0")

    def copies(rate: float, **place: Any) -> tuple[Sample, ...]:
        return tuple(
            Sample("h2d-bandwidth", "bytes_per_s", rate * factor, number=n, **place)
            for n, factor in enumerate((0.99, 1.0, 1.01))
        )

    jobs: list[JobEvidence] = []
    boots: list[list[Run]] = []
    for node, layout, level in ((0, "pin", 1.0), (1, "default", 0.9)):
        switches = Switches.from_layout(PRESETS[layout])
        head = RunHead("x", "cluster", Origin.MEASURED, Vantage.GUEST, switches, host="h")
        boots.append([])
        for name in "abc":
            rate = 50e9 * level * rng.lognormvariate(0, 0.01)
            samples = copies(rate, device=gpu, node=node)
            jobs.append(job(NodeSharing.EXCLUSIVE, rate, name=f"{node}-{name}", samples=samples))
            boot = structs.replace(head, name=name, host_addresses=True)
            boots[-1].append(Run(boot, copies(rate, index=0)))
    runs = list(convert_copies(jobs))
    near, far = ([run for run in runs if run.head.arrangement == one] for one in (NEAR, FAR))
    study, trial = _effect(near, far), _effect(*boots)
    assert study.low is not None
    for name in ("ratio", "low", "high", "p"):
        assert getattr(study, name) == getattr(trial, name), name


def _between(node: str, binding: int | None) -> JobEvidence:
    rate, name = 130e9, f"{node}-{binding}"
    one = Sample("p2p-bandwidth", "bytes_per_s", rate, device=Bdf.parse("11:00.0"), node=binding)
    return job(NodeSharing.EXCLUSIVE, rate, name=name, node=node, samples=(one,))


def test_one_binding_on_two_nodes_of_the_cluster_is_one_binding() -> None:
    jobs = [_between(node, 0) for node in ("n1", "n2")] + [_between("n3", None)]
    multi = reported(*jobs).recommendations[2]
    assert (multi.queue, multi.measured) == (RecommendedQueue.UNKNOWN, False)
    jobs += [_between(node, 1) for node in ("n1", "n2")]
    assert reported(*jobs).recommendations[2].queue is RecommendedQueue.EITHER


def test_what_sharing_changes_rests_on_the_users_own_program_alone() -> None:
    inside = Sample("d2d-bandwidth", "bytes_per_s", 2e12, device=Bdf.parse("11:00.0"))
    modes = (NodeSharing.EXCLUSIVE, NodeSharing.ALONE)
    alike = (job(mode, 1.0, name=str(mode), samples=(inside,)) for mode in modes)
    assert not reported(*alike).recommendations[1].measured
    rng = random.Random(5)

    def answer_of(ratio: float, count: int) -> tuple[RecommendedQueue, bool]:
        jobs = []
        for mode, level in zip(modes, (1.0, ratio), strict=True):
            for number in range(count):
                took = Sample("app-time:gmx", "ns", 1e9 * level * rng.lognormvariate(0, 0.005))
                jobs.append(job(mode, 1.0, name=f"{mode}-{number}", samples=(took,)))
        found = reported(*jobs).recommendations[1]
        return found.queue, found.measured

    assert answer_of(1.0, 4) == (RecommendedQueue.SHARED, True)
    assert answer_of(1.2, 4) == (RecommendedQueue.EXCLUSIVE, True)
    assert answer_of(1.0, 1) == (RecommendedQueue.UNKNOWN, False)
    assert answer_of(0.0, 4) == (RecommendedQueue.SHARED, False)


def test_the_page_has_the_studys_figures_as_charts_and_tables(gh200: Path) -> None:
    report = of_directory(gh200)
    page = render_page(build_study_page(report, "now"))
    drawn = re.findall(r'<svg class="chart" role="img" aria-label="([^"]*)"', page)
    maps = ("host to device", "device to host", "host to device latency")
    assert drawn[:3] == [f"the node: {name}" for name in maps]
    bars = [one for one in drawn if "deviation" in one]
    assert bars[0] == "host to device, mean \u00b1 deviation"
    shown = page[page.index("Copies by NUMA node and GPU") : page.index("Mean and deviation")]
    for name in ("NUMA 0", "NUMA 3", "0009:01", "0039:01"):
        assert f">{name}</text>" in shown
    for head in ("Which queue for which work", "Copies by copy engine (CE)", "Hardware and tools"):
        assert f">{head}" in page
    assert re.search(r">driver</th>\s*<td[^>]*>560.35.03</td>", page)


def test_spreads_are_means_with_deviations_near_far_and_shared(gh200: Path) -> None:
    report = of_directory(gh200)
    found = {(one.metric, one.method, one.label): one for one in report.spreads}
    near = found["h2d-bandwidth", "CE", NEAR]
    far = found["h2d-bandwidth", "CE", FAR]
    assert (round(near.mean / 1e9, 1), near.count) == (411.6, 4)
    assert (round(far.mean / 1e9, 1), far.count) == (88.6, 12)
    assert near.deviation is not None and 0 < near.deviation < 0.01 * near.mean
    assert ("h2d-latency", "SM", NEAR) in found, "latency is measured by the GPU's processors"
    assert {label for _, _, label in found} >= {"1 GPU, together", "2 GPUs, together"}
    assert json.loads(encode("slurm-report", report))["spreads"][0]["method"] == "CE"


def test_copies_by_sm_are_apart_from_those_by_copy_engines() -> None:
    gpu = Bdf.parse("11:00.0")
    both = tuple(
        Sample("h2d-bandwidth", "bytes_per_s", rate, device=gpu, node=0, variant=variant)
        for rate, variant in ((50e9, None), (40e9, "sm"), (90e9, "both ways"))
    )
    report = reported(job(NodeSharing.EXCLUSIVE, 50e9, samples=both))
    assert {(one.method, one.mean) for one in report.spreads} == {("CE", 50e9), ("SM", 40e9)}
    assert all(one.deviation is None for one in report.spreads)
