"""gres.conf as sites write it: detectors that fill up, MIG slices, files that are not read."""

import pytest

from homenode.cluster.slurm.check import Checked, check
from homenode.cluster.slurm.config import parse_config
from homenode.cluster.slurm.gres import right_gpus
from homenode.findings import Severity
from homenode.vm.sources import load_host
from tests.slurm.gpu_nodes import MESH, TESTBED, machine
from tests.slurm.test_check import CGROUP, CLUSTER, NEW, checked, ids, right_gres


@pytest.mark.parametrize(
    "gres", ["Name=gpu AutoDetect=nvml\n", "AutoDetect=nvml\nName=gpu Type=h100\n"]
)
def test_what_lines_leave_out_a_detector_fills_up(gres: str) -> None:
    host = load_host("hgx-h100")
    assert ids(checked(gres, host, "2x56x2"), info=True) == []
    assert ids(checked(gres, host, "2x56x2", 9)) == ["gres-count"]


def test_a_line_that_is_set_right_keeps_what_else_it_says() -> None:
    host = machine(TESTBED)
    gres = "Name=gpu Type=t File=/dev/nvidia[0-7] Cores=0-15 Flags=nvidia_gpu_env # ours\n"
    assert checked(gres, host, "2x16x2").gres == (
        "# ours\n"
        "Name=gpu Type=t File=/dev/nvidia[0-3] Cores=0-15 Flags=nvidia_gpu_env\n"
        "Name=gpu Type=t File=/dev/nvidia[4-7] Cores=16-31 Flags=nvidia_gpu_env\n"
    )


def test_no_gpu_is_lost_from_a_file_that_is_set_right() -> None:
    host = machine(TESTBED)
    gres = "Name=gpu File=/dev/nvidia[0-3] Cores=16-31\nName=gpu Count=4\n"
    found = checked(gres, host, "2x16x2")
    assert "gres-cores-wrong" in ids(found) and found.gres == gres


def test_cores_stay_where_the_machine_tells_no_better() -> None:
    host = load_host("x86-2p2n8c16t-gpu-node-unknown")
    known = [gpu.cores is not None for gpu in right_gpus(host)]
    assert known.count(False) == 1
    gres = "".join(f"Name=gpu File=/dev/nvidia{n} Cores=4-7\n" for n in range(len(known)))
    fixed = checked(gres, host, "2x4x2", len(known)).gres
    assert fixed.count("Cores=") == fixed.count("Name=gpu")


SLICES = "".join(
    f"Name=gpu Type=1g.10gb MultipleFiles=/dev/nvidia{gpu},/dev/nvidia-caps/nvidia-cap{part}{gpu} "
    f"Cores={cores}\n"
    for gpu, cores in ((0, "0-15"), (7, "16-31"))
    for part in (1, 2)
)


def test_mig_slices_are_counted_and_have_their_gpus_cores() -> None:
    host = machine(TESTBED)
    slurm = CLUSTER + "NodeName=s Sockets=2 CoresPerSocket=16 ThreadsPerCore=2 Gres=gpu:1g.10gb:4\n"

    def found(gres: str, slurm: str = slurm) -> Checked:
        return check(
            parse_config(gres, "gres.conf"),
            parse_config(slurm, "slurm.conf"),
            host,
            cgroup=parse_config(CGROUP, "c"),
            version=NEW,
        )

    assert ids(found(SLICES)) == ["gres-unjudged"]
    assert ids(found("AutoDetect=nvml\n")) == ["gres-unjudged"]
    assert ids(found(SLICES, slurm.replace(":4", ":7"))) == ["gres-count"]
    wrong = found(SLICES.replace("16-31", "0-15"))
    assert set(ids(wrong)) == {"gres-cores-wrong", "gres-unjudged"} and wrong.gres == SLICES


def test_links_are_of_the_gpus_that_a_node_has_to_slurm() -> None:
    host = machine(MESH)
    some = "".join(
        f"Name=gpu File=/dev/nvidia{n} Cores={cores} Links={links}\n"
        for n, cores, links in ((0, "0-3", "-1,0"), (2, "4-7", "0,-1"))
    )
    assert ids(checked(some, host, "2x4x1", 2)) == []
    wrong = checked(some.replace("-1,0", "-1,2"), host, "2x4x1", 2)
    assert ids(wrong) == ["gres-links-wrong"] and wrong.gres == some


def test_what_an_unread_file_may_say_is_not_called_missing() -> None:
    host = machine(TESTBED)
    bare = "Include cluster.conf\nSelectType=select/linear\n"
    found = checked(right_gres(host), host, "2x16x2", slurm=bare, cgroup=CGROUP)
    by_id = {f.id: f.severity for f in found.findings.findings}
    assert by_id["slurm-gres-types"] is Severity.INCONCLUSIVE
    assert by_id["slurm-select-type"] is Severity.CRITICAL
    assert "GresTypes" not in found.slurm and "SelectType=select/cons_tres" in found.slurm
    (empty,) = [
        f
        for f in checked("Include gpus.conf\n", host, "2x16x2").findings.findings
        if f.id == "gres-count"
    ]
    assert empty.severity is Severity.INCONCLUSIVE


def test_memory_alone_is_no_way_to_give_out_cores() -> None:
    host = machine(TESTBED)
    slurm = CLUSTER.replace("CR_Core_Memory", "CR_Memory")
    fixed = checked(right_gres(host), host, "2x16x2", slurm=slurm).slurm
    assert "SelectTypeParameters=CR_Core_Memory,ENFORCE_BINDING_GRES\n" in fixed
    one_task = CLUSTER.replace("CR_Core_Memory", "CR_Core_Memory,CR_ONE_TASK_PER_CORE")
    assert ids(checked(right_gres(host), host, "2x16x2", slurm=one_task)) == []


def test_cpus_alone_make_a_socket_of_each_thread() -> None:
    # As Slurm 22.05.8 shows a node of CPUs=64: Sockets=64, GPUs on sockets 0 to 31.
    host = machine(TESTBED)
    slurm = CLUSTER + "NodeName=s CPUs=64 Gres=gpu:8\n"
    found = check(
        parse_config(right_gres(host), "gres.conf"),
        parse_config(slurm, "slurm.conf"),
        host,
        cgroup=parse_config(CGROUP, "c"),
        version=NEW,
    )
    assert ids(found) == ["slurm-shape-differs"]
    assert "each thread for a socket" in str(found.findings.findings[0].cost)


def test_without_cgroups_nothing_is_kept_apart() -> None:
    host = machine(TESTBED)
    found = checked(right_gres(host), host, "2x16x2", cgroup=CGROUP + "CgroupPlugin=disabled\n")
    assert ids(found) == ["cgroup-cores-open", "cgroup-devices-open"]
    for plugin in ("autodetect", "cgroup/v1", "cgroup/v2"):
        kept = checked(right_gres(host), host, "2x16x2", cgroup=f"{CGROUP}CgroupPlugin={plugin}\n")
        assert ids(kept) == []
