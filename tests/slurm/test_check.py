"""gres.conf, slurm.conf and cgroup.conf: what is wrong with them on a machine, and set right."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from homenode.cluster.slurm.check import Checked, check
from homenode.cluster.slurm.check_slurm import SlurmVersion
from homenode.cluster.slurm.config import parse_config
from homenode.cluster.slurm.gres import right_gpus
from homenode.cluster.slurm.numbering import core_order
from homenode.errors import InputError, ParseError
from homenode.findings import Severity
from homenode.machine.topology import Host
from homenode.vm.sources import load_host
from tests.shared_data import needs_shared, shared
from tests.slurm.gpu_nodes import MESH, MI250X, TESTBED, machine

CLUSTER = """\
SelectType=select/cons_tres
SelectTypeParameters=CR_Core_Memory,ENFORCE_BINDING_GRES
TaskPlugin=task/affinity,task/cgroup
ProctrackType=proctrack/cgroup
GresTypes=gpu
"""
CGROUP = "ConstrainCores=yes\nConstrainDevices=yes\n"
NEW = SlurmVersion(24, 5)


def checked(
    gres: str,
    host: Host,
    shape: str,
    gpus: int | None = None,
    slurm: str = CLUSTER,
    cgroup: str | None = CGROUP,
    version: SlurmVersion | None = NEW,
) -> Checked:
    sockets, cores, threads = shape.split("x")
    promised = len(right_gpus(host)) if gpus is None else gpus
    node = (
        f"NodeName=n[01-36] Sockets={sockets} CoresPerSocket={cores} ThreadsPerCore={threads} "
        f"Gres=gpu:{promised} State=UNKNOWN\n"
    )
    return check(
        parse_config(gres, "gres.conf"),
        parse_config(slurm + node, "slurm.conf"),
        host,
        cgroup=None if cgroup is None else parse_config(cgroup, "cgroup.conf"),
        version=version,
    )


def ids(of: Checked, *, info: bool = False) -> list[str]:
    return [f.id for f in of.findings.findings if info or f.severity is not Severity.INFO]


HOSTS = (
    "hgx-h100",
    "gh200x4",
    "small-2n8c-2gpu",
    "mi350x-epyc9575f",
    "rtx4090-epyc7702",
    "hgx-a100-ibm",
)


def right_gres(host: Host) -> str:
    """A line for each GPU, as a careful administrator writes them."""
    return "".join(
        f"Name=gpu File=/dev/nvidia{gpu.index} Cores={gpu.cores}\n" for gpu in right_gpus(host)
    )


@pytest.mark.parametrize("name", HOSTS)
def test_the_right_cores_of_a_described_machine_are_well(name: str) -> None:
    host = load_host(name)
    assert ids(checked(right_gres(host), host, _shape(host))) == []


@pytest.mark.parametrize("name", HOSTS)
def test_cores_not_given_are_missing(name: str) -> None:
    host = load_host(name)
    count = len(right_gpus(host))
    found = checked(f"Name=gpu File=/dev/nvidia[0-{count - 1}]\n", host, _shape(host))
    one_node = len({gpu.node for gpu in right_gpus(host)}) == 1 and len(host.nodes) == 1
    assert ids(found) == ([] if one_node else ["gres-cores-missing"])
    again = checked(found.gres, host, _shape(host))
    assert ids(again) == [] and again.gres == found.gres


@pytest.mark.parametrize("name", HOSTS)
def test_cores_of_the_other_nodes_are_wrong(name: str) -> None:
    host = load_host(name)
    gpus = right_gpus(host)
    nodes = {gpu.node: gpu.cores for gpu in gpus}
    turned = list(nodes.values())[1:] + list(nodes.values())[:1]
    wrong = dict(zip(nodes, turned, strict=True))
    gres = "".join(f"Name=gpu File=/dev/nvidia{g.index} Cores={wrong[g.node]}\n" for g in gpus)
    found = checked(gres, host, _shape(host))
    assert set(ids(found)) == {"gres-cores-wrong"} and len(ids(found)) == len(gpus)
    assert all(f.severity is Severity.CRITICAL for f in found.findings.findings[: len(gpus)])
    assert ids(checked(found.gres, host, _shape(host))) == []


@pytest.mark.parametrize("count", range(2, 9))
def test_fewer_gpus_listed_than_promised_drain_the_node(count: int) -> None:
    host = machine(TESTBED)
    gres = "".join(right_gres(host).splitlines(keepends=True)[:count])
    same = ids(checked(gres, host, "2x16x2", count), info=True)
    assert ("gres-count" in same) == (count < 8) and "gres-count" not in ids(
        checked(gres, host, "2x16x2", count)
    )
    more = checked(gres, host, "2x16x2", count + 1)
    assert ids(more) == ["gres-count"]
    assert more.findings.findings[0].severity is Severity.CRITICAL


def test_more_gpus_than_the_machine_has_are_critical() -> None:
    host = machine(TESTBED)
    found = checked(right_gres(host) + "Name=gpu File=/dev/nvidia8\n", host, "2x16x2", 9)
    assert "gres-count" in ids(found)
    assert found.gres.endswith("Name=gpu File=/dev/nvidia8\n")


def test_numbers_of_pus_are_no_numbers_of_cores() -> None:
    host = load_host("hgx-h100")
    gres = (
        "NodeName=n[01-36] Name=gpu Type=h100 File=/dev/nvidia[0-3] Cores=0-55,112-167\n"
        "NodeName=n[01-36] Name=gpu Type=h100 File=/dev/nvidia[4-7] Cores=56-111,168-223\n"
    )
    found = checked(gres, host, "2x56x2")
    assert ids(found) == ["gres-cores-are-pus"] * 2
    assert found.gres == gres.replace(",112-167", "").replace(",168-223", "")


def test_siblings_side_by_side_are_seen_as_pus_too() -> None:
    text = TESTBED.replace("packages = 2", 'packages = 2\nnumbering = "siblings-adjacent"')
    host = machine(text)
    assert str(core_order(host).pus[1]) == "2-3"
    found = checked("Name=gpu File=/dev/nvidia[0-3] Cores=0-31\n", host, "2x16x2", 4)
    assert ids(found) == ["gres-cores-are-pus"]


def test_some_of_the_right_cores_are_near_all_the_same() -> None:
    host = machine(TESTBED)
    gres = right_gres(host).replace("Cores=0-15", "Cores=0-7")
    found = checked(gres, host, "2x16x2")
    assert ids(found) == [] and ids(found, info=True).count("gres-cores-wrong") == 4
    assert found.gres == gres


def test_a_machine_without_gpus_cannot_stand_for_their_nodes() -> None:
    with pytest.raises(InputError, match="expected a machine with GPUs"):
        checked("Name=gpu File=/dev/nvidia0\n", load_host("xeon-2p-cpus"), "2x56x2", 1)


def test_a_line_over_two_sockets_is_split() -> None:
    host = machine(TESTBED)
    gres = "# ours\nName=gpu Type=t File=/dev/nvidia[0-7] \\\n Cores=0-15\n"
    found = checked(gres, host, "2x16x2")
    assert ids(found) == ["gres-cores-wrong"]
    assert found.gres == (
        "# ours\nName=gpu Type=t File=/dev/nvidia[0-3] Cores=0-15\n"
        "Name=gpu Type=t File=/dev/nvidia[4-7] Cores=16-31\n"
    )


def test_gpus_in_another_order_than_their_nodes_get_their_own_cores() -> None:
    host = machine(MI250X)
    gres = "Name=gpu File=/dev/dri/renderD[128-135]\n"
    found = checked(gres, host, "4x8x2", slurm=CLUSTER + "SlurmdParameters=numa_node_as_socket\n")
    assert found.gres.splitlines() == [
        "Name=gpu File=/dev/dri/renderD[128-129] Cores=24-31",
        "Name=gpu File=/dev/dri/renderD[130-131] Cores=8-15",
        "Name=gpu File=/dev/dri/renderD[132-133] Cores=0-7",
        "Name=gpu File=/dev/dri/renderD[134-135] Cores=16-23",
    ]


@needs_shared
def test_on_a_captured_mi250x_the_cores_near_each_gpu_are_right_too() -> None:
    host = load_host(str(shared("machines/hwloc/eas-tioga.xml")))
    near = "".join(
        f"Name=gpu File=/dev/dri/renderD{128 + g.index} Cores={g.near}\n" for g in right_gpus(host)
    )
    assert ids(checked(near, host, "4x16x2")) == []


def test_links_are_judged_against_the_machines() -> None:
    host = machine(MESH)
    bare = right_gres(host)
    assert "gres-links-missing" in ids(checked(bare, host, "2x4x1"), info=True)
    right = checked(bare, host, "2x4x1").gres
    assert "Links=-1,2,0,0" in right and "Links=0,0,2,-1" in right
    assert ids(checked(right, host, "2x4x1")) == []
    wrong = right.replace("-1,2,0,0", "-1,0,2,0")
    assert ids(checked(wrong, host, "2x4x1")) == ["gres-links-wrong"]
    assert checked(wrong, host, "2x4x1").gres == right
    assert ids(checked(right.replace("-1,2,0,0", "-1,2"), host, "2x4x1")) == ["gres-links-wrong"]
    several = "Name=gpu File=/dev/nvidia[0-1] Cores=0-3 Links=-1,2,0,0\n"
    assert "gres-links-wrong" in ids(checked(several, host, "2x4x1", 2))


def test_all_links_alike_are_not_missed() -> None:
    host = load_host("gh200x4")
    found = checked(right_gres(host), host, "4x72x1")
    assert ids(found, info=True) == ["gres-autodetect"]
    stated = found.findings.checked[0]
    assert "4 GPUs on 4 nodes with CPUs; 32 nodes of GPU memory" in stated


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
    there = load_host(host)
    assert ids(checked(f"AutoDetect={detector}\n", there, _shape(there))) == expected


def test_what_is_given_in_addition_to_a_detector_must_agree_with_it() -> None:
    host = load_host("hgx-h100")
    gres = "AutoDetect=nvml\nName=gpu File=/dev/nvidia[0-7] Cores=0-111\n"
    found = checked(gres, host, "2x56x2").findings.findings
    assert [(f.id, f.severity) for f in found] == [("gres-cores-wrong", Severity.CRITICAL)]
    assert "drained" in str(found[0].cost)
    assert ids(checked("AutoDetect=nvml\n", host, "2x56x2", 4)) == ["gres-count"]


def test_nodes_without_any_line_are_found() -> None:
    assert ids(checked("", machine(TESTBED), "2x16x2")) == ["gres-count"]


def test_a_socket_that_spans_nodes_is_reported_and_set_right() -> None:
    host = machine(MI250X)
    found = checked("AutoDetect=rsmi\n", host, "1x32x2")
    assert ids(found) == ["slurm-sockets-span-nodes"]
    assert "Sockets=4 CoresPerSocket=8 ThreadsPerCore=2" in found.slurm
    assert found.slurm.endswith("SlurmdParameters=numa_node_as_socket\n")


def test_a_shape_that_the_machine_has_not_is_critical() -> None:
    host = machine(TESTBED)
    assert ids(checked(right_gres(host), host, "2x32x2")) == ["slurm-shape-differs"]


@pytest.mark.parametrize(
    ("node", "expected"),
    [
        ("Sockets=2 CoresPerSocket=16 RealMemory=524288", []),
        ("Sockets=2 CoresPerSocket=16 RealMemory=524289", ["slurm-memory-differs"]),
        ("Sockets=4 CoresPerSocket=8", ["slurm-shape-differs"]),
        ("Sockets=1 CoresPerSocket=32", ["slurm-shape-differs"]),
    ],
)
def test_memory_and_sockets_are_those_of_the_machine(node: str, expected: list[str]) -> None:
    host = machine(TESTBED)
    slurm = f"{CLUSTER}NodeName=n {node} ThreadsPerCore=2 Gres=gpu:8\n"
    found = check(
        parse_config(right_gres(host), "gres.conf"),
        parse_config(slurm, "slurm.conf"),
        host,
        cgroup=parse_config(CGROUP, "c"),
        version=NEW,
    )
    assert ids(found) == expected
    with pytest.raises(ParseError, match="RealMemory"):
        check(parse_config("", "g"), parse_config("NodeName=n RealMemory=64G\n", "s"), host)


def test_sockets_are_not_judged_where_the_host_shows_no_nodes() -> None:
    host = replace(machine(TESTBED), nodes_assumed=True)
    assert ids(checked(right_gres(host), host, "4x8x2")) == []


def test_an_older_slurm_cannot_take_numa_nodes_for_sockets() -> None:
    host = machine(MI250X)
    old = checked("AutoDetect=rsmi\n", host, "1x32x2", version=SlurmVersion(21, 8))
    assert ids(old) == [] and "numa_node_as_socket" not in old.slurm


def test_settings_of_the_cluster_are_found_and_set_right() -> None:
    bare = (
        "ClusterName=c\nSelectType=select/cons_res SelectTypeParameters=CR_CPU  # old\n"
        "TaskPlugin=task/none\nGresTypes=nic\n"
    )
    host = machine(TESTBED)
    found = checked(right_gres(host), host, "2x16x2", slurm=bare, cgroup="ConstrainCores=no\n")
    assert set(ids(found, info=True)) == {
        "slurm-select-type",
        "slurm-gres-types",
        "slurm-cores-shared",
        "slurm-binding-optional",
        "slurm-task-plugin",
        "slurm-proctrack",
        "cgroup-cores-open",
        "cgroup-devices-open",
        "gres-autodetect",
    }
    assert found.slurm.splitlines()[1:4] == [
        "SelectType=select/cons_tres SelectTypeParameters=CR_Core,ENFORCE_BINDING_GRES  # old",
        "TaskPlugin=task/affinity,task/cgroup",
        "GresTypes=nic,gpu",
    ]
    assert found.slurm.endswith("ProctrackType=proctrack/cgroup\n")
    again = check(
        parse_config(found.gres, "g"),
        parse_config(found.slurm, "s"),
        host,
        cgroup=parse_config(CGROUP, "c"),
        version=NEW,
    )
    assert ids(again) == [] and again.slurm == found.slurm


def test_an_older_slurm_gets_nothing_that_it_does_not_know() -> None:
    host = machine(TESTBED)
    slurm = CLUSTER.replace(",ENFORCE_BINDING_GRES", "")
    old = checked(right_gres(host), host, "2x16x2", slurm=slurm, version=SlurmVersion(22, 5, 8))
    assert ids(old) == [] and "ENFORCE_BINDING_GRES" not in old.slurm
    (advice,) = (f for f in old.findings.findings if f.id == "slurm-binding-optional")
    assert "--gres-flags=enforce-binding" in str(advice.fix)
    newer = checked(right_gres(host), host, "2x16x2", slurm=slurm)
    assert ids(newer) == ["slurm-binding-optional"]
    unknown = checked(right_gres(host), host, "2x16x2", slurm=slurm, version=None)
    assert ids(unknown) == []
    added = [line for line in unknown.slurm.splitlines() if "ENFORCE" in line]
    assert len(added) == 1 and added[0].startswith("# from 23.11.2 on")
    default = checked(
        right_gres(host), host, "2x16x2", slurm=CLUSTER.replace("SelectType=select/cons_tres\n", "")
    )
    assert ids(default) == []


def test_what_is_not_there_to_read_is_reported() -> None:
    host = machine(TESTBED)
    found = checked(
        right_gres(host), host, "2x16x2", slurm=CLUSTER + "Include x.conf\n", cgroup=None
    )
    assert ids(found) == ["cgroup-unjudged", "config-include"]
    with pytest.raises(InputError, match="expected a node other"):
        check(parse_config("", "gres.conf"), parse_config("", "slurm.conf"), host, nodes=("other",))


def test_lines_about_other_nodes_too_are_left_alone() -> None:
    host = machine(TESTBED)
    gres = "Name=gpu File=/dev/nvidia[0-7]\n"
    slurm = CLUSTER + (
        "NodeName=a Sockets=2 CoresPerSocket=16 ThreadsPerCore=2 Gres=gpu:8\n"
        "NodeName=b Sockets=2 CoresPerSocket=8 ThreadsPerCore=2 Gres=gpu:8\n"
    )
    found = check(parse_config(gres, "gres.conf"), parse_config(slurm, "slurm.conf"), host)
    assert found.gres == gres
    assert "gres-cores-missing" in ids(found) and "slurm-shape-differs" in ids(found)


@given(st.data())
@settings(max_examples=60)
def test_damaged_files_are_judged_or_refused_with_a_line(data: st.DataObject) -> None:
    host = machine(TESTBED)
    text = list(right_gres(host) + CLUSTER)
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(text) - 1))
        text[at] = data.draw(st.sampled_from(["", "[", "]", "=", "\\", '"', "9", "\n", "#", "-"]))
    damaged = "".join(text)
    try:
        found = check(parse_config(damaged, "gres.conf"), parse_config(damaged, "slurm.conf"), host)
    except ParseError as error:
        assert error.line is not None
    else:
        assert found.findings.checked


def _shape(host: Host) -> str:
    """Sockets as nodes, as a careful administrator declares them."""
    order = core_order(host)
    nodes = sum(bool(node.pus) for node in host.nodes)
    return f"{nodes}x{len(order.pus) // nodes}x{order.threads}"
