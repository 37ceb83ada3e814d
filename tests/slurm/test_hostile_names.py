"""Names that others chose, in what homenode writes for Slurm: each is one name, or is refused."""

import shlex
import shutil
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from homenode.cluster.arguments import SharedJobShape, StudyOptions
from homenode.cluster.slurm.config import config_word, parse_config, replace_words
from homenode.cluster.slurm.gres import parse_gres_lines
from homenode.cluster.slurm.record import render_hooks
from homenode.cluster.slurm.slurm_nodes import parse_nodes
from homenode.cluster.slurm.study.experiments import (
    Experiment,
    NodeSharing,
    check_options,
    choose_nodes,
    render_script,
)
from homenode.errors import InputError, UsageError
from tests.hostile_names import NAMES, SHELL_NAMES, run_shell, stub


@pytest.mark.parametrize("name", NAMES, ids=ascii)
def test_the_hooks_of_slurm_take_a_plain_directory_alone(name: str) -> None:
    try:
        written_hooks = render_hooks(f"/{name}")
    except UsageError:
        return
    assert f"spool=/{name}\n" in written_hooks["prolog.sh"]
    assert shlex.quote(name) == name and shlex.split(f"/{name}") == [f"/{name}"]


ALONE = Experiment(
    "shared-1gpu-n1-alone-r1", NodeSharing.ALONE, ("n1",), "parts", 1, cpus=4, block=0
)


def options_refused(**fields: object) -> bool:
    try:
        check_options(replace(StudyOptions(), **fields))
    except UsageError:
        return True
    return False


@pytest.mark.parametrize("name", NAMES, ids=ascii)
def test_a_studys_options_hold_names_that_need_no_quotes(name: str) -> None:
    fields: dict[str, object] = dict.fromkeys(("account", "qos", "reservation", "mpi"), name)
    fields |= {"partition_exclusive": name, "partition_shared": name, "node_list": (name,)}
    fields["shapes"] = (SharedJobShape(1, 1, gres=name),)
    for field, value in fields.items():
        is_plain = shlex.quote(name) == name and not name.startswith("-")
        assert options_refused(**{field: value}) or is_plain


def test_a_studys_script_passes_on_words_as_they_are(tmp_path: Path) -> None:
    stubs = stub(tmp_path / "bin", "scontrol", "squeue", "homenode", "hostname")
    for tool in ("mkdir", "date"):
        (stubs / tool).symlink_to(str(shutil.which(tool)))
    words = tuple(SHELL_NAMES)
    app = StudyOptions(
        tests=(), app=words, metric="".join(words), app_directory=str(tmp_path), homenode="homenode"
    )
    text = render_script(ALONE, app, "abc")
    assert len([line for line in text.split("\n") if line.startswith("#SBATCH")]) == 12
    script = tmp_path / "script"
    script.write_text(text.replace("$PWD", str(tmp_path)))
    calls = run_shell(script, stubs=stubs, SLURM_JOB_ID="5")
    bench = next(call for call in calls if call[:2] == ["homenode", "bench"])
    assert tuple(shlex.split(bench[bench.index("--app") + 1])) == words
    assert bench[bench.index("--metric") + 1] == "".join(words)


def test_a_partition_that_no_script_can_hold_is_refused() -> None:
    nodes = parse_nodes("n1|a b*|idle|64|512000|gpu:8\n")
    with pytest.raises(UsageError, match="expected a partition of letters"):
        choose_nodes(nodes, StudyOptions())


# Configuration files


@given(st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), min_size=1))
def test_a_word_of_slurms_files_is_read_as_it_was_written(value: str) -> None:
    try:
        line = f"Name=gpu {config_word('Type', value)} Count=2"
    except InputError:
        assert '"' in value or "\n" in value or "\r" in value
        return
    (read,) = parse_config(line, "x").lines
    assert read.words == (("name", "gpu"), ("type", value), ("count", "2"))


ROWS = st.lists(
    st.sampled_from(
        [
            "Sockets=1 ",
            "Feature=Sockets=9 ",
            'Reason="Sockets=8 x" ',
            "CPUs=4 ",
            "\\\n",
            "  ",
            "\t",
            "Port=\\#1\\\\ ",
            "Sockets=\\# ",
        ]
    ),
    max_size=6,
)


@given(ROWS, st.sampled_from(["", "# Sockets=7 Gres=gpu:9", "# \\"]), st.booleans())
def test_words_of_a_line_become_its_place(pieces: list[str], comment: str, is_quoted: bool) -> None:
    text = f"NodeName=a {''.join(pieces)}{comment}"
    (line,) = parse_config(text, "slurm.conf").lines
    wanted = {"Sockets": "4", "Gres": "gpu:8 x" if is_quoted else "gpu:8"}
    edited = "\n".join(replace_words(text.split("\n"), wanted))
    (after,) = parse_config(edited, "slurm.conf").lines
    lower = {key.lower(): value for key, value in wanted.items()}
    kept = tuple((key, lower.get(key, value)) for key, value in line.words)
    missing = tuple((k, v) for k, v in lower.items() if k not in dict(line.words))
    assert after.words == kept + missing
    assert edited.endswith(comment)


def test_a_corrected_gres_conf_names_the_nodes_that_it_named() -> None:
    text = 'NodeName=gpu\\#1 Name=gpu Type=h100 File=/dev/nvidia[0-1] Flags="a \\# b"\n'
    (line,) = parse_gres_lines(parse_config(text, "gres.conf"))
    assert list(line.nodes or ()) == ["gpu#1"]
    assert config_word("NodeName", "gpu#1") == "NodeName=gpu\\#1"
