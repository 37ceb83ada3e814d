"""gres.conf, slurm.conf and cgroup.conf: what is wrong with them on a machine, and set right."""

import random
from typing import NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from homenode.cluster.slurm.check import check, gpu_cores
from homenode.cluster.slurm.config import parse_config
from homenode.cluster.slurm.correction import correct, find_shared_lines
from homenode.cluster.slurm.job_allocation import build_core_order
from homenode.errors import InputError
from homenode.findings import Findings, Severity
from homenode.machine.topology import Host
from homenode.vm.sources import load_host
from tests.shared_data import needs_shared, shared
from tests.slurm.gpu_nodes import MI250X, TESTBED, machine

CLUSTER = """\
SelectType=select/cons_tres
SelectTypeParameters=CR_Core_Memory,ENFORCE_BINDING_GRES
TaskPlugin=task/affinity,task/cgroup
GresTypes=gpu
"""
SHAPE_OF_TESTBED = "Sockets=2 CoresPerSocket=16 ThreadsPerCore=2"
H100 = "Sockets=2 CoresPerSocket=56 ThreadsPerCore=2"
ALL = "Name=gpu File=/dev/nvidia[0-7]\n"
CGROUP = "ConstrainCores=yes\nConstrainDevices=yes\n"


class Checked(NamedTuple):
    """The findings, and both files as they should be."""

    findings: Findings
    gres: str
    slurm: str


def checked_files(gres: str, slurm: str, host: Host, cgroup: str | None = CGROUP) -> Checked:
    files = parse_config(gres, "gres.conf"), parse_config(slurm, "slurm.conf")
    limits = None if cgroup is None else parse_config(cgroup, "cgroup.conf")
    corrected = correct(*files, host)
    findings = check(*files, host, cgroup=limits)
    return Checked(findings, corrected["gres.conf"], corrected["slurm.conf"])


def checked(
    gres: str,
    host: Host,
    shape: str = "",
    gpus: int | None = None,
    slurm: str = CLUSTER,
    cgroup: str | None = CGROUP,
) -> Checked:
    promised = len(gpu_cores(host)) if gpus is None else gpus
    node = f"NodeName=n[01-36] {_words(shape or _shape(host))} Gres=gpu:{promised} State=UNKNOWN\n"
    return checked_files(gres, slurm + node, host, cgroup)


def ids(of: Checked, *, info: bool = False) -> list[str]:
    return [f.id for f in of.findings.findings if info or f.severity is not Severity.INFO]


HOSTS = "hgx-h100 gh200x4 small-2n8c-2gpu mi350x-epyc9575f rtx4090-epyc7702 hgx-a100-ibm".split()


def right_gres(host: Host) -> str:
    """A line for each GPU, as a careful administrator writes them."""
    line = "Name=gpu File=/dev/nvidia{} Cores={}\n"
    return "".join(line.format(gpu.index, gpu.cores) for gpu in gpu_cores(host))


@pytest.mark.parametrize("name", HOSTS)
def test_the_right_cores_of_a_described_machine_are_well(name: str) -> None:
    host = load_host(name)
    found = checked(right_gres(host), host)
    assert ids(found) == [] and found.gres == right_gres(host)


@pytest.mark.parametrize("name", HOSTS)
def test_cores_not_given_are_missing(name: str) -> None:
    host = load_host(name)
    count = len(gpu_cores(host))
    found = checked(f"Name=gpu File=/dev/nvidia[0-{count - 1}]\n", host)
    one_node = len({gpu.node for gpu in gpu_cores(host)}) == 1 and len(host.nodes) == 1
    assert ids(found) == ([] if one_node else ["gres-cores-missing"])
    again = checked(found.gres, host)
    assert ids(again) == [] and again.gres == found.gres


@pytest.mark.parametrize("name", HOSTS)
def test_cores_of_the_other_nodes_are_wrong(name: str) -> None:
    host = load_host(name)
    gpus = gpu_cores(host)
    nodes = {gpu.node: gpu.cores for gpu in gpus}
    turned = list(nodes.values())[1:] + list(nodes.values())[:1]
    wrong = dict(zip(nodes, turned, strict=True))
    gres = "".join(f"Name=gpu File=/dev/nvidia{g.index} Cores={wrong[g.node]}\n" for g in gpus)
    found = checked(gres, host)
    assert set(ids(found)) == {"gres-cores-wrong"} and len(ids(found)) == len(gpus)
    assert all(f.severity is Severity.CRITICAL for f in found.findings.findings[: len(gpus)])
    assert ids(checked(found.gres, host)) == []


@pytest.mark.parametrize(
    ("listed", "promised", "severity"),
    [
        (8, 8, None),
        (7, 7, Severity.WARNING),
        (7, 8, Severity.CRITICAL),
        (8, 7, Severity.CRITICAL),
        (9, 9, Severity.CRITICAL),
        (0, 8, Severity.CRITICAL),
        (0, 0, Severity.CRITICAL),
    ],
)
def test_gpus_are_counted_on_machine(listed: int, promised: int, severity: Severity | None) -> None:
    host = load_host("hgx-h100")
    lines = [*right_gres(host).splitlines(), "Name=gpu File=/dev/nvidia8 Cores=56-111"]
    found = checked("".join(f"{line}\n" for line in lines[:listed]), host, gpus=promised)
    counts = [f.severity for f in found.findings.findings if f.id == "gres-count"]
    assert counts[:1] == ([] if severity is None else [severity])
    assert "Gres=gpu:8 State" in found.slurm
    again = checked_files(found.gres, found.slurm, host)
    assert ids(again) == [] and (again.gres, again.slurm) == (found.gres, found.slurm)
    whole = "NodeName=n[01-36] Name=gpu File=/dev/nvidia[0-3] Cores=0-55\n"
    assert found.gres == right_gres(host) if listed else found.gres.startswith(whole)


def test_a_node_without_gres_gets_no_gpu_and_that_is_critical() -> None:
    host = load_host("hgx-h100")
    slurm = f"{CLUSTER}NodeName=n {H100}\n"
    for gres in ("", "AutoDetect=nvml\n", "Name=gpu File=/dev/nvidia[0-7]\n"):
        found = checked_files(gres, slurm, host)
        assert "gres-count" in ids(found)
        assert found.slurm == slurm.replace("Core=2\n", "Core=2 Gres=gpu:8\n")
        assert ids(checked_files(found.gres, found.slurm, host)) == []


def test_a_type_that_jobs_may_ask_for_stays_in_slurm_conf() -> None:
    host = load_host("hgx-h100")
    slurm = f"{CLUSTER}NodeName=n {H100} Gres=gpu:h100:8\n"
    found = checked_files(right_gres(host), slurm, host)
    (finding,) = (f for f in found.findings.findings if f.id == "gres-type-differs")
    assert finding.expected == "Type=h100 in gres.conf, as slurm.conf has"
    assert finding.headline == "the GPU types of n differ"
    assert found.slurm == slurm and found.gres.count(" Type=h100") == right_gres(host).count("\n")
    assert ids(checked_files(found.gres, found.slurm, host)) == []


@pytest.mark.parametrize(
    ("listed", "promised", "gpus", "severity", "right"),
    [
        ("a100", "h100", 8, Severity.CRITICAL, "h100"),
        ("h100", "a100", 8, Severity.CRITICAL, "h100"),
        ("a100", "h100", 7, Severity.CRITICAL, "h100"),
        ("a100", "a100", 8, Severity.WARNING, "a100"),
        ("big", "h100", 8, Severity.CRITICAL, "big"),
        ("h100_80gb", "h100_80gb", 8, None, "h100_80gb"),
    ],
)
def test_the_machine_decides_which_file_has_the_right_type(
    listed: str, promised: str, gpus: int, severity: Severity | None, right: str
) -> None:
    host = load_host("hgx-h100")
    gres = "".join(right_gres(host).splitlines(keepends=True)[:gpus])
    gres = gres.replace("Name=gpu ", f"Name=gpu Type={listed} ")
    found = checked_files(gres, f"{CLUSTER}NodeName=n {H100} Gres=gpu:{promised}:8\n", host)
    severities = [f.severity for f in found.findings.findings if f.id == "gres-type-differs"]
    assert severities == ([] if severity is None else [severity])
    assert f"Gres=gpu:{right}:8" in found.slurm and found.gres.count(f"Type={right} ") == 8


@pytest.mark.parametrize(
    ("gres", "before", "after"),
    [
        ("AutoDetect=nvml\n", "gpu:h100:6,gpu:t1000:2", "gpu:h100:6,gpu:t1000:2"),
        ("AutoDetect=nvml\n", "gpu:h100:6,gpu:t1000:1", "gpu:h100:6,gpu:t1000:1"),
        ("", "gpu:h100:6,gpu:t1000:2", "gpu:h100:6,gpu:t1000:2"),
        ("AutoDetect=nvml\nName=gpu File=/dev/nvidia7 Cores=56-111\n", "gpu:8", "gpu:8"),
        ("AutoDetect=nvml\nName=gpu File=/dev/nvidia7 Cores=56-111\n", "gpu:7", "gpu:8"),
        ("AutoDetect=nvml\n", "gpu:7,gpumem:640G,nic:2", "gpu:8,gpumem:640G,nic:2"),
    ],
)
def test_only_counts_of_a_single_gpu_type_are_corrected(gres: str, before: str, after: str) -> None:
    node = "NodeName=n Sockets=2 CoresPerSocket=56 ThreadsPerCore=2 Gres="
    corrected = checked_files(gres, f"{CLUSTER}{node}{before}\n", load_host("hgx-h100"))
    assert corrected.gres == gres and corrected.slurm == f"{CLUSTER}{node}{after}\n"


@pytest.mark.parametrize(
    ("gres", "words", "headline"),
    [
        ("AutoDetect=nvml\n", " Gres=gpu:9", "slurm.conf assigns n 9 GPUs instead of 8"),
        ("AutoDetect=nvml\n", "", "slurm.conf assigns n no GPUs"),
        ("", " Gres=gpu:8", "gres.conf has no line for the GPUs of n"),
        ("Name=gpu File=/dev/nvidia[0-6]\n", " Gres=gpu:7", "gres.conf lists 7 GPUs of n instead"),
        ("NodeName=x Name=gpu File=/dev/nvidia[0-7]\n", "", "slurm.conf does not define x"),
        (f"{ALL}Name=gpu File=/dev/nvidia[2-3]\n", " Gres=gpu:8", "/dev/nvidia[2-3] of n twice"),
        ("Name=gpu File=/dev/nvidia[1-8]\n", " Gres=gpu:8", "gres.conf lists GPU 8 of n, which"),
    ],
)
def test_the_first_line_names_the_file_that_differs(gres: str, words: str, headline: str) -> None:
    slurm = f"{CLUSTER}NodeName=n {H100}{words}\n"
    found = checked_files(gres, slurm, load_host("hgx-h100")).findings.findings
    assert any(headline in f.headline for f in found if f.id == "gres-count")


@given(st.integers(0, 2**32))
@settings(max_examples=60, deadline=None)
def test_the_pair_that_is_printed_passes_the_check(seed: int) -> None:
    draw = random.Random(seed)
    host = load_host(draw.choice(HOSTS))
    count = len(gpu_cores(host))
    order = list(range(count + 1))
    draw.shuffle(order)
    kind = draw.choice(("", "large"))
    cores = len(build_core_order(host).pus)
    lines = []
    while order and draw.random() > 0.1:
        members, order = order[: draw.randint(1, 4)], order[4:]
        first = draw.randrange(cores)
        words = [f"Name=gpu File=/dev/nvidia[{','.join(map(str, members))}]"]
        words += draw.choice(([], [f"Cores={first}-{draw.randrange(first, cores)}"]))
        lines.append(" ".join([*words, *([f"Type={kind}"] if kind else []), "# ours"]) + "\n")
    promises = ("", f"gpu:{draw.randint(1, 9)}", f"gpu:small:{count},nic:2", f"gpu:{count}")
    promise = draw.choice([f" Gres={gres}" if gres else "" for gres in promises])
    slurm = f"{CLUSTER}NodeName=n {_words(_shape(host))}{promise}\n"
    found = checked_files("".join(lines), slurm, host)
    again = checked_files(found.gres, found.slurm, host)
    assert ids(again) == [], (lines, promise, found.gres, found.slurm)
    assert (again.gres, again.slurm) == (found.gres, found.slurm)
    assert ("nic:2" in promise) == ("nic:2" in found.slurm)


def test_numbers_of_pus_are_no_numbers_of_cores() -> None:
    host = load_host("hgx-h100")
    gres = (
        "NodeName=n[01-36] Name=gpu Type=h100 File=/dev/nvidia[0-3] Cores=0-55,112-167\n"
        "NodeName=n[01-36] Name=gpu Type=h100 File=/dev/nvidia[4-7] Cores=56-111,168-223\n"
    )
    found = checked(gres, host)
    assert ids(found) == ["gres-cores-are-cpus"] * 2
    assert found.gres == gres.replace(",112-167", "").replace(",168-223", "")
    half = checked(gres.replace("0-55,112-167", "0-27,112-139"), host)
    assert ids(half) == ["gres-cores-are-cpus"] * 2
    assert "no cores 112-139" in half.findings.findings[0].observed


def test_siblings_side_by_side_are_seen_as_pus_too() -> None:
    text = TESTBED.replace("packages = 2", 'packages = 2\nnumbering = "siblings-adjacent"')
    host = machine(text)
    assert str(build_core_order(host).pus[1]) == "2-3"
    found = checked("Name=gpu File=/dev/nvidia[0-3] Cores=0-31\n", host, gpus=4)
    assert "gres-cores-are-cpus" in ids(found)


def test_cores_in_brackets_are_read_as_slurmctld_reads_them() -> None:
    host = machine(TESTBED)
    gres = "Name=gpu File=/dev/nvidia[0-3] Cores=[0-15]\n"
    gres += "Name=gpu File=/dev/nvidia[4-7] CPUs=16-31\n"
    assert ids(checked(gres, host)) == [] and checked(gres, host).gres == gres
    found = checked(gres.replace("16-31", "[0-7,8-15]"), host)
    assert ids(found) == ["gres-cores-wrong"] and found.gres == gres


def test_some_of_the_right_cores_are_near_all_the_same() -> None:
    host = machine(TESTBED)
    gres = right_gres(host).replace("Cores=0-15", "Cores=0-7")
    found = checked(gres, host)
    assert ids(found) == [] and found.gres == gres


def test_a_machine_without_gpus_cannot_stand_for_their_nodes() -> None:
    with pytest.raises(InputError, match="no GPUs on this host"):
        checked("Name=gpu File=/dev/nvidia0\n", load_host("xeon-2p-cpus"), "2x56x2", 1)


def test_a_line_over_two_sockets_is_split_and_keeps_what_else_it_says() -> None:
    host = machine(TESTBED)
    gres = "Name=gpu Type=t File=/dev/nvidia[0-7] Count=8 Cores=0-15 Flags=nvidia_gpu_env # ours\n"
    found = checked(gres, host)
    assert ids(found) == ["gres-cores-wrong"]
    assert found.gres == (
        "Name=gpu Type=t File=/dev/nvidia[0-3] Count=4 Cores=0-15 Flags=nvidia_gpu_env # ours\n"
        "Name=gpu Type=t File=/dev/nvidia[4-7] Count=4 Cores=16-31 Flags=nvidia_gpu_env # ours\n"
    )


def test_gpus_in_another_order_than_their_nodes_get_their_own_cores() -> None:
    host = machine(MI250X)
    found = checked("Name=gpu File=/dev/dri/renderD[128-135]\n", host, "4x8x2")
    assert found.gres.splitlines() == [
        "Name=gpu File=/dev/dri/renderD[128-129] Cores=24-31",
        "Name=gpu File=/dev/dri/renderD[130-131] Cores=8-15",
        "Name=gpu File=/dev/dri/renderD[132-133] Cores=0-7",
        "Name=gpu File=/dev/dri/renderD[134-135] Cores=16-23",
    ]


@needs_shared
def test_on_a_captured_mi250x_the_cores_near_each_gpu_are_right_too() -> None:
    host = load_host(str(shared("machines/hwloc/eas-tioga.xml")))
    line = "Name=gpu File=/dev/dri/renderD{} Cores={}\n"
    near = "".join(line.format(128 + gpu.index, gpu.local_cores) for gpu in gpu_cores(host))
    assert ids(checked(near, host, "4x16x2")) == []


def test_nodes_of_gpu_memory_have_no_cores() -> None:
    host = load_host("gh200x4")
    found = checked(right_gres(host), host)
    assert ids(found, info=True) == ["gres-autodetect"]
    assert "4 GPUs on 4 nodes with CPUs; 32 nodes of GPU memory" in found.findings.checked[0]


@pytest.mark.parametrize(
    ("host", "detector", "expected"),
    [
        ("hgx-h100", "nvml", []),
        ("hgx-h100", "rsmi", ["gres-autodetect"]),
        ("mi350x-epyc9575f", "rsmi", []),
        ("mi350x-epyc9575f", "nvml", ["gres-autodetect"]),
    ],
)
def test_the_detector_fits_the_gpus(host: str, detector: str, expected: list[str]) -> None:
    assert ids(checked(f"AutoDetect={detector}\n", load_host(host))) == expected


@pytest.mark.parametrize(
    "gres", ["Name=gpu AutoDetect=nvml\n", "AutoDetect=nvml\nName=gpu Type=h100\n"]
)
def test_what_lines_leave_out_a_detector_fills_up(gres: str) -> None:
    host = load_host("hgx-h100")
    assert ids(checked(gres, host), info=True) == []
    assert ids(checked(gres, host, gpus=9)) == ["gres-count"]


def test_what_is_given_in_addition_to_a_detector_must_agree_with_it() -> None:
    host = load_host("hgx-h100")
    gres = "AutoDetect=nvml\nName=gpu File=/dev/nvidia[0-7] Cores=0-111\n"
    found = checked(gres, host).findings.findings
    assert [(f.id, f.severity) for f in found] == [("gres-cores-wrong", Severity.CRITICAL)]
    assert "drained" in str(found[0].cost)
    assert ids(checked("AutoDetect=nvml\n", host, gpus=4)) == ["gres-count"]


def test_no_gpu_is_lost_from_a_file_that_is_set_right() -> None:
    host = machine(TESTBED)
    gres = "Name=gpu File=/dev/nvidia[0-3] Cores=16-31\nName=gpu Count=4\n"
    found = checked(gres, host)
    assert "gres-cores-wrong" in ids(found) and found.gres == gres


def test_cores_stay_where_the_machine_tells_no_better() -> None:
    host = load_host("x86-2p2n8c16t-gpu-node-unknown")
    known = [gpu.cores is not None for gpu in gpu_cores(host)]
    assert known.count(False) == 1
    gres = "".join(f"Name=gpu File=/dev/nvidia{n} Cores=4-7\n" for n in range(len(known)))
    found = checked(gres, host, "2x4x2", len(known))
    assert "gres-unjudged" in ids(found)
    assert found.gres.count("Cores=") == found.gres.count("Name=gpu")


SLICES = "".join(
    f"Name=gpu Type=1g.10gb MultipleFiles=/dev/nvidia{gpu},/dev/nvidia-caps/nvidia-cap{part}{gpu} "
    f"Cores={cores}\n"
    for gpu, cores in ((0, "0-15"), (7, "16-31"))
    for part in (1, 2)
)


def test_mig_slices_are_counted_and_have_their_gpus_cores() -> None:
    host = machine(TESTBED)
    slurm = f"{CLUSTER}NodeName=s {SHAPE_OF_TESTBED} Gres=gpu:1g.10gb:4\n"
    assert ids(checked_files(SLICES, slurm, host)) == ["gres-unjudged"]
    assert ids(checked_files("AutoDetect=nvml\n", slurm, host)) == ["gres-unjudged"]
    more = checked_files(SLICES, slurm.replace(":4", ":7"), host)
    assert ids(more) == ["gres-count"] and more.slurm == slurm
    wrong = checked_files(SLICES.replace("16-31", "0-15"), slurm, host)
    assert set(ids(wrong)) == {"gres-cores-wrong", "gres-unjudged"} and wrong.gres == SLICES


def test_what_an_unread_file_may_say_is_not_called_missing() -> None:
    host = machine(TESTBED)
    found = checked(right_gres(host), host, slurm="Include x.conf\nSelectType=select/linear\n")
    by_id = {f.id: f.severity for f in found.findings.findings}
    assert by_id["slurm-gres-types"] is Severity.INCONCLUSIVE
    assert by_id["slurm-select-type"] is Severity.CRITICAL
    assert found.findings.not_checked[0].startswith("slurm.conf:1: Include x.conf: ")
    assert "GresTypes" not in found.slurm and "SelectType=select/cons_tres" in found.slurm
    empty = checked("Include gpus.conf\n", host)
    assert empty.gres == "Include gpus.conf\n"
    assert [f.severity for f in empty.findings.findings] == [Severity.INCONCLUSIVE]


def test_a_shape_that_the_machine_has_not_is_critical() -> None:
    host = machine(TESTBED)
    assert ids(checked(right_gres(host), host, "2x32x2")) == ["slurm-shape-differs"]
    # As Slurm 22.05.8 shows a node of CPUs=64: Sockets=64, GPUs on sockets 0 to 31.
    slurm = CLUSTER + "NodeName=s CPUs=64 Gres=gpu:8\n"
    assert ids(checked_files(right_gres(host), slurm, host)) == ["slurm-shape-differs"]


def test_settings_of_the_cluster_are_found_and_set_right() -> None:
    bare = (
        "ClusterName=c\nSelectType=select/cons_res SelectTypeParameters=CR_CPU  # old\n"
        "TaskPlugin=task/none\nGresTypes=nic\n"
    )
    host = machine(TESTBED)
    found = checked(right_gres(host), host, slurm=bare, cgroup="ConstrainCores=no\n")
    assert set(ids(found, info=True)) == {
        *"slurm-select-type slurm-gres-types slurm-binding-optional slurm-task-plugin".split(),
        *"cgroup-cores-open cgroup-devices-open gres-autodetect".split(),
    }
    headlines = {finding.id: finding.headline for finding in found.findings.findings}
    assert headlines["slurm-task-plugin"] == "TaskPlugin lacks task/affinity or task/cgroup"
    assert found.slurm.splitlines()[1:4] == [
        "SelectType=select/cons_tres SelectTypeParameters=CR_CPU  # old",
        "TaskPlugin=task/affinity,task/cgroup",
        "GresTypes=nic,gpu",
    ]
    again = checked_files(found.gres, found.slurm, host)
    assert ids(again) == [] and again.slurm == found.slurm
    bare += "NodeName=n Gres=gpu:8\n"
    found = checked_files(right_gres(host), bare, host)
    assert "slurm-cores-shared" in ids(found) and "SelectTypeParameters=CR_Core " in found.slurm


@pytest.mark.parametrize(
    ("slurm", "cgroup", "near"),
    [
        (CLUSTER.replace("TaskPlugin", "TaskPlugn"), CGROUP, "slurm.conf:3.*TaskPlugin"),
        (f"{CLUSTER}NodeNames=n1\n", CGROUP, "slurm.conf:5.*NodeName"),
        (CLUSTER, "\nConstrainCore=yes\n", "cgroup.conf:2.*ConstrainCores"),
        (f"{CLUSTER}TaskPluginParam=none\nHashPlugin=hash/sha3\n", CGROUP, None),
    ],
)
def test_a_key_that_stops_slurm_is_named(slurm: str, cgroup: str, near: str | None) -> None:
    host = load_host("hgx-h100")
    if near is None:
        assert ids(checked(right_gres(host), host, slurm=slurm, cgroup=cgroup)) == []
        return
    with pytest.raises(InputError, match=rf"{near}=\?"):
        checked(right_gres(host), host, slurm=slurm, cgroup=cgroup)


def test_nodes_with_gpus_of_another_model_are_not_corrected() -> None:
    host = load_host("hgx-h100")
    gres = "NodeName=a Name=gpu Type=a100 File=/dev/nvidia[0-3]\n"
    gres += right_gres(host).replace("Name=gpu ", "NodeName=h Name=gpu Type=h100 ")
    nodes = f"NodeName=a {H100} Gres=gpu:a100:4\nNodeName=h {H100} Gres=gpu:h100:8\n"
    found = checked_files(gres, CLUSTER + nodes, host)
    assert ids(found) == ["gres-type-differs"] and found.gres == gres


def test_jobs_get_no_device_of_a_line_without_files() -> None:
    host = load_host("hgx-h100")
    found = checked("Name=gpu Count=8 Cores=0-55\n", host)
    assert ids(found) == ["gres-count"] and "File=" in str(found.findings.findings[0].fix)


def test_memory_alone_leaves_the_cores_to_every_job() -> None:
    host = load_host("hgx-h100")
    slurm = CLUSTER.replace("CR_Core_Memory", "CR_Memory")
    found = checked(right_gres(host), host, slurm=slurm)
    assert ids(found) == ["slurm-cores-shared"]
    assert "memory alone" in str(found.findings.findings[0].cost)


def test_a_part_of_the_nodes_cores_is_worth_knowing_and_stays() -> None:
    host = load_host("hgx-h100")
    gres = right_gres(host).replace("Cores=56-111", "Cores=56-110")
    found = checked(gres, host)
    assert ids(found) == [] and found.gres == gres
    (part, *_) = (f for f in found.findings.findings if f.id == "gres-cores-wrong")
    assert (part.severity, part.expected) == (Severity.INFO, "Cores=56-111")


def test_without_cgroups_nothing_is_kept_apart() -> None:
    host = machine(TESTBED)
    found = checked(right_gres(host), host, cgroup=CGROUP + "CgroupPlugin=disabled\n")
    assert ids(found) == ["cgroup-cores-open", "cgroup-devices-open"]
    for plugin in ("autodetect", "cgroup/v1", "cgroup/v2"):
        assert ids(checked(right_gres(host), host, cgroup=f"{CGROUP}CgroupPlugin={plugin}\n")) == []
    assert "--cgroup" in checked(right_gres(host), host, cgroup=None).findings.unknown[0]


def test_gpus_of_a_node_that_slurm_conf_lacks_or_gives_none_are_critical() -> None:
    host = machine(TESTBED)
    lines = right_gres(host).replace("Name=", "NodeName=n[01-36],x9 Name=")
    for slurm in (CLUSTER, f"{CLUSTER}NodeName=x9 {SHAPE_OF_TESTBED}\n"):
        found = checked(lines, host, slurm=slurm)
        missing = [f for f in found.findings.findings if f.subject == "x9" and f.is_bad]
        assert [(f.id, f.severity) for f in missing] == [("gres-count", Severity.CRITICAL)]


def test_a_node_that_no_file_names_is_refused() -> None:
    with pytest.raises(InputError, match="no node other"):
        check(parse_config("", "g"), parse_config("", "s"), machine(TESTBED), nodes=("other",))


def test_lines_about_other_nodes_too_are_left_alone() -> None:
    node = f"NodeName=a {SHAPE_OF_TESTBED} Gres=gpu:8\n"
    slurm = f"{CLUSTER}{node}{node.replace('=a ', '=b ').replace('=16', '=8')}"
    found = checked_files(ALL, slurm, machine(TESTBED))
    assert found.gres == ALL
    assert ids(found) == ["slurm-shape-differs", "gres-cores-missing"]
    assert "--nodes a" in str(found.findings.findings[0].fix)


@pytest.mark.parametrize(
    ("nodes", "names", "others"),
    [((), "hgx[01-09]", ()), (("hgx01",), "hgx[01-09]", ("hgx02", "hgx09")), ((), None, ())],
)
def test_a_line_about_several_lines_of_nodes_is_corrected_for_all_of_them(
    nodes: tuple[str, ...], names: str | None, others: tuple[str, ...]
) -> None:
    host = load_host("hgx-h100")
    right = right_gres(host).replace("Name=", f"NodeName={names} Name=" if names else "Name=")
    shape = f"{H100} Gres=gpu:8"
    slurm = f"{CLUSTER}NodeName=hgx[01-08] {shape}\nNodeName=hgx09 {shape}\n"
    files = parse_config(right.replace("56-111", "0-55"), "g"), parse_config(slurm, "s")
    shared_by = find_shared_lines(*files, host, nodes).values()
    assert {set(others) <= set(of_line) for of_line in shared_by} == ({True} if others else set())
    assert correct(*files, host, nodes)["g"] == (files[0].text if others else right)
    fixes = {f.fix for f in check(*files, host, nodes=nodes).findings if "cores" in f.id}
    assert all(("--nodes 'hgx[01-09]'" in str(fix)) == bool(nodes) for fix in fixes)


def _words(shape: str) -> str:
    return "Sockets={} CoresPerSocket={} ThreadsPerCore={}".format(*shape.split("x"))


def _shape(host: Host) -> str:
    """Sockets as nodes, as a careful administrator declares them."""
    order = build_core_order(host)
    nodes = sum(bool(node.pus) for node in host.nodes)
    return f"{nodes}x{len(order.pus) // nodes}x{order.threads}"
