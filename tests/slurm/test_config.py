"""Slurm's configuration grammar: words, comments, joined lines, host lists, and damaged text."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from homenode.cluster.slurm.config import ConfigFile, parse_config
from homenode.cluster.slurm.gres import (
    find_autodetect,
    find_lines,
    group_nodes,
    list_node_definitions,
    parse_gres_lines,
)
from homenode.cluster.slurm.scontrol import parse_gpu_types, parse_owned_gpus, parse_scontrol_jobs
from homenode.cluster.slurm.slurm_nodes import (
    NodeShape,
    compress_hostlist,
    expand_hostlist,
    read_shapes,
)
from homenode.errors import ParseError
from tests.cpu_time import cpu_time_below

GRES = """\
# GPUs of the cluster
AutoDetect=nvml
nodename=node[01-03] NAME=gpu Type=h100 FILE=/dev/nvidia[0-3] \\
  cores=0-15   # of socket 0
NodeName=node03 AutoDetect=off Name=nic Count=2
NodeName=node[01-02] Name=gpu File=/dev/nvidia4 CPUs=[16-31]
"""


def test_keys_are_of_any_case_and_a_backslash_joins_lines() -> None:
    lines = parse_config(GRES, "gres.conf").lines
    assert [(line.first, line.last) for line in lines] == [(2, 2), (3, 4), (5, 5), (6, 6)]
    words = "nodename=node[01-03] name=gpu type=h100 file=/dev/nvidia[0-3] cores=0-15"
    assert lines[1].words == tuple(tuple(word.split("=")) for word in words.split())


def test_a_hash_begins_a_comment_unless_it_is_escaped() -> None:
    config = parse_config('Prolog=/a\\#b  # not this\nX = "two words"\n#Y=1\n', "slurm.conf")
    assert [line.words for line in config.lines] == [(("prolog", "/a#b"),), (("x", "two words"),)]


def test_the_last_value_of_the_cluster_holds_and_those_of_nodes_do_not() -> None:
    text = "TaskPlugin=none\nTaskPlugin=affinity\nNodeName=a TaskPlugin=x\n"
    config = parse_config(text, "slurm.conf")
    found = config.find_last("taskplugin")
    assert found is not None and found[0] == "affinity" and found[1].first == 2


def test_an_included_file_that_no_one_reads_is_named() -> None:
    (other,) = parse_config("A=1\ninclude /etc/slurm/nodes.conf\n", "s").not_read
    assert (other.path, other.place) == ("/etc/slurm/nodes.conf", "s:2")


def test_lines_of_an_included_file_stand_where_it_is_included() -> None:
    files = {"hpc-more.conf": "A=2\nInclude deep.conf\nB=1", "deep.conf": "A=3\n"}

    def include(name: str, neighbours: str) -> tuple[ConfigFile, ...] | str:
        asked.append((name, neighbours))
        return (ConfigFile(name, files[name]),) if name in files else "no such file"

    asked: list[tuple[str, str]] = []
    text = "ClusterName=hpc\nA=1\nInclude %c-more.conf\nA=4\nInclude gone.conf\n"
    config = parse_config(text, "slurm.conf", include)
    assert [(line.source, line.first, line.words[0]) for line in config.lines] == [
        ("slurm.conf", 1, ("clustername", "hpc")),
        ("slurm.conf", 2, ("a", "1")),
        ("hpc-more.conf", 1, ("a", "2")),
        ("deep.conf", 1, ("a", "3")),
        ("hpc-more.conf", 3, ("b", "1")),
        ("slurm.conf", 4, ("a", "4")),
    ]
    # Slurm 22.05.8 looks next to the file that has the line.
    assert asked[:2] == [("hpc-more.conf", "slurm.conf"), ("deep.conf", "hpc-more.conf")]
    assert [file.source for file in config.included] == ["hpc-more.conf", "deep.conf"]
    assert [other.path for other in config.not_read] == ["gone.conf"]
    assert config.find_rows(config.lines[4]) == ["B=1"]
    assert parse_config("Include %c.conf\n", "s", include).not_read[0].path == "%c.conf"


def test_an_error_in_an_included_file_names_that_file() -> None:
    with pytest.raises(ParseError) as caught:
        parse_config("A=1\nInclude b\n", "a", lambda *_: (ConfigFile("b", "\n\nwhat\n"),))
    assert (caught.value.source, caught.value.line) == ("b", 3)


def test_files_that_include_each_other_are_refused() -> None:
    with pytest.raises(ParseError, match="8 deep"):
        parse_config("Include a\n", "a", lambda name, _: (ConfigFile(name, "Include a\n"),))
    with pytest.raises(ParseError, match="256 included files"):
        names = "".join(f"Include {n}\n" for n in range(300))
        parse_config(names, "a", lambda name, _: (ConfigFile(name, "A=1\n"),))


@pytest.mark.parametrize(
    ("text", "line"), [("A=1\nwhat is this\n", 2), ("\n\nA=\n", 3), ("A=1 B\n", 1), ("=1", 1)]
)
def test_a_word_that_is_none_is_named_with_its_line(text: str, line: int) -> None:
    with pytest.raises(ParseError) as caught:
        parse_config(text, "slurm.conf")
    assert caught.value.line == line


def test_gres_lines_tell_nodes_files_and_cores() -> None:
    lines = parse_gres_lines(parse_config(GRES, "gres.conf"))
    assert [line.devices for line in find_lines(lines, "node01")] == [4, 1]
    assert [line.devices for line in find_lines(lines, "node03")] == [4]
    assert str(lines[-1].cores) == "16-31"
    assert find_autodetect(lines, "node01") == "nvml"
    assert find_autodetect(lines, "node03") is None


@pytest.mark.parametrize(
    "bad",
    [
        *("Cores=0-", "Cores=a", "Cores=[a]", "Cores=[0-3", "Count=many", "File=/dev/n[0"),
        *("Typ=h100", "NodeNmae=n", "File=/dev/n[0-1] Count=3"),
    ],
)
def test_a_bad_value_of_gres_is_named_with_its_line(bad: str) -> None:
    with pytest.raises(ParseError) as caught:
        parse_gres_lines(parse_config(f"\nName=gpu {bad}\n", "gres.conf"))
    assert caught.value.line == 2


@pytest.mark.parametrize(
    ("text", "count", "indices"),
    [
        ("gpu:h100:6(IDX:0-1,4-7)", 6, (0, 1, 4, 5, 6, 7)),
        ("gpu:a:1(IDX:3),gpu:b:2(IDX:0-1),nic:1", 3, (0, 1, 3)),
        ("gres/gpu:2", 2, None),
        ("gpu:h100:0(IDX:N/A)", 0, ()),
        ("gpu:1g.10gb:1(IDX:9)", 1, (9,)),
        ("gpu:h100(CNT:2)", 2, None),
        ("shard:3(0/4,3/4)", 1, (1,)),
        ("gpu:1(IDX:2),mps:50(IDX:2)", 2, (2,)),
        ("(null)", 0, ()),
        ("", 0, ()),
        ("gpu:2(IDX:0,5)", 2, (0, 5)),
    ],
)
def test_the_gpus_of_a_job_are_read(text: str, count: int, indices: tuple[int, ...] | None) -> None:
    found = parse_owned_gpus(text, "job")
    assert (found.count, found.indices) == (count, indices)


def test_a_node_says_how_many_gpus_it_has_of_each_type() -> None:
    assert parse_gpu_types("gpu:h100:8(S:0-1),nic:2") == {"h100": 8}
    assert parse_gpu_types("gpu:a:2,gpu:b:4") == {"a": 2, "b": 4}
    assert parse_gpu_types("gpu") == {"": 1}
    assert parse_gpu_types("nic:2") == {}


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("a", ("a",)),
        ("n[1-3]", ("n1", "n2", "n3")),
        ("n[08-10],m", ("n08", "n09", "n10", "m")),
        ("r[1-2]c[1-2]", ("r1c1", "r1c2", "r2c1", "r2c2")),
        ("n[1,3]-ib", ("n1-ib", "n3-ib")),
    ],
)
def test_host_lists_are_expanded_in_order(text: str, names: tuple[str, ...]) -> None:
    assert expand_hostlist(text) == names


@pytest.mark.parametrize(
    "text",
    ["n[1-", "n]1", "n[3-1]", "n[0-999999999]", "n[1-300]c[1-300]", "", "a,,b", "n[]", "a b"],
)
def test_host_lists_that_are_none_or_too_long_are_refused(text: str) -> None:
    with pytest.raises(ParseError):
        expand_hostlist(text)


PARTS = st.tuples(st.sampled_from(["gpu", "n-"]), st.integers(0, 2000), st.integers(1, 5))


@given(st.lists(PARTS, min_size=1, max_size=60))
def test_a_compressed_list_expands_to_the_same_names(parts: list[tuple[str, int, int]]) -> None:
    names = {f"{prefix}{number:0{width}}" for prefix, number, width in parts}
    assert set(expand_hostlist(compress_hostlist(names))) == names


@given(st.text(alphabet='nNaAmMeE=[]0123-, \\"#\n\tCoresLinkFdvi/', max_size=200))
def test_any_text_is_read_or_refused_with_its_line(text: str) -> None:
    try:
        lines = parse_gres_lines(parse_config(text, "gres.conf"))
    except ParseError as error:
        assert error.line is not None and 1 <= error.line <= text.count("\n") + 1
    else:
        assert all(line.line.first >= 1 for line in lines)


def test_defaults_of_nodes_fill_in_what_later_lines_leave_out() -> None:
    config = parse_config(
        "NodeName=DEFAULT Sockets=2 CoresPerSocket=8 ThreadsPerCore=2\n"
        "NodeName=a[1-2] Gres=gpu:4\n"
        "NodeName=b Boards=1 SocketsPerBoard=4 CoresPerSocket=4 CPUs=32\n"
        "NodeName=c ThreadsPerCore=1 CPUs=16\n",
        "slurm.conf",
    )
    a, b, c = list_node_definitions(config)
    assert a.shape == NodeShape(2, 8, 2, 32) and a.gpu_types == {"": 4} and a.names == ("a1", "a2")
    assert b.shape == NodeShape(2, 4, 2, 32) and b.gpu_types == {}
    assert c.shape is not None and (c.shape.cores, c.shape.cpus) == (16, 16)


def test_shapes_are_read_from_both_layouts_of_show_node() -> None:
    block = (
        "NodeName=gpu01 Arch=x86_64 CoresPerSocket=16 \n   CPUAlloc=32 CPUEfctv=64 CPUTot=64\n"
        "   Gres=(null)\n   RealMemory=512000 Sockets=2 Boards=1\n   State=MIXED ThreadsPerCore=2\n"
    )
    expected = {"gpu01": NodeShape(2, 16, 2, 64)}
    assert read_shapes(block, "nodes") == expected
    assert read_shapes(" ".join(block.split()) + "\n", "nodes") == expected


SECONDS = 2
NODES = "NodeName=n[1-60000] CPUs=8 Gres=gpu:8\n"
COSTLY = {
    "the same nodes on 1,000 lines": (NODES, f"{NODES.partition(' ')[0]} Name=gpu\n" * 1000),
    "files of 1,000 lines": (NODES, "Name=gpu File=/dev/nvidia[0-60000]\n" * 1000),
    "1,000 definitions": (NODES * 1000, "Name=gpu\n"),
    "lines for all of 60,000 nodes": (NODES, "Name=gpu\n" * 20_000),
    "a line of 100,000 words": ("NodeName=n1 " + "a=b " * 100_000, "Name=gpu\n"),
    "a line of 30,000 joined ones": ("NodeName=n1 \\\n" + "CPUs=8 \\\n" * 30_000, "Name=gpu\n"),
    "500,000 lines": ("#\n" * 500_000, "Name=gpu\n"),
    "names of 100,000 letters": (NODES, f"NodeName={'n' * 100_000}[1-60000] Name=gpu\n"),
    "one line each of 10,000 nodes": (
        NODES,
        "".join(f"NodeName=n{n} Name=gpu\n" for n in range(1, 10_001)),
    ),
}


@pytest.mark.parametrize("name", COSTLY)
def test_small_files_that_want_minutes_or_gigabytes_get_seconds(name: str) -> None:
    slurm, gres = COSTLY[name]
    with cpu_time_below(SECONDS):
        try:
            group_nodes(parse_config(gres, "gres.conf"), parse_config(slurm, "slurm.conf"))
        except ParseError as error:
            assert len(str(error)) < 300


def test_a_listing_whose_jobs_each_hold_65536_nodes_is_read_as_far_as_a_cluster_goes() -> None:
    job = (
        "JobId={0} JobName=a\n   UserId=ada(1) GroupId=ada(1)\n   JobState=RUNNING Reason=None\n"
        "   NodeList=g[1-65536]\n     Nodes=g[1-65536] CPU_IDs=0-7 Mem=1 GRES=gpu:1(IDX:0)\n"
        "   MinCPUsNode=1\n\n"
    )
    with cpu_time_below(SECONDS):
        jobs = parse_scontrol_jobs("".join(map(job.format, range(1, 200))))
    assert len(jobs) == 199
    assert [job.unreadable is None for job in jobs] == [at < 3 for at in range(199)]


def test_a_job_has_no_more_gpus_than_a_node() -> None:
    with pytest.raises(ParseError, match="at most 4096 GPUs"):
        parse_owned_gpus("gpu:h100:2(IDX:0-65535)", "job 1")
