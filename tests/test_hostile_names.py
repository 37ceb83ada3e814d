"""Names that others chose, in everything that homenode writes for other programs: each is one name
to the program that reads it, or is refused."""

import shlex
import shutil
import subprocess
from functools import cache
from pathlib import Path

import pytest
import yaml  # type: ignore[import-untyped]
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs
from msgspec.structs import replace

from homenode.bdf import Bdf
from homenode.change.retrain.install import libvirt_hook, systemd_unit
from homenode.cluster.bindings.experiments import (
    Experiment,
    Mode,
    check_options,
    choose_nodes,
)
from homenode.cluster.bindings.scripts import script_of
from homenode.cluster.kubevirt.manifest_options import ManifestOptions
from homenode.cluster.kubevirt.manifests import manifests
from homenode.cluster.kubevirt.object import yaml_text
from homenode.cluster.slurm.config import config_word, parse_config, with_words
from homenode.cluster.slurm.gres import gres_lines
from homenode.cluster.slurm.options import Shape, StudyOptions
from homenode.cluster.slurm.record import hooks
from homenode.errors import InputError, UsageError
from homenode.machine.tools.slurm_nodes import parse_nodes
from homenode.plan.vm_file import vm_of_options
from homenode.vm.targets.registry import target_named
from homenode.vm.targets.target import Rendering
from homenode.wording import command_line, operands
from tests.hostile_names import NAMES
from tests.targets.written import host_named, options, written

GPU = Bdf.parse("0000:81:00.0")
ENCODED = [name for name in NAMES if "\udcff" not in name]
SHELL_NAMES = [name for name in ENCODED if "\0" not in name]


def run_shell(
    script: Path, *words: str, shell: str = "bash", stubs: Path, **variables: str
) -> list[list[str]]:
    """The commands that a script runs, of programs of which there are only stand-ins."""
    log = stubs / "log"
    log.write_bytes(b"")
    subprocess.run(
        [shutil.which(shell) or shell, str(script), *words],
        env={"PATH": str(stubs), **variables},
        check=True,
        capture_output=True,
    )
    calls = log.read_bytes().decode().split("\1")[:-1]
    return [call.split("\0")[:-1] for call in calls]


def stub(folder: Path, *names: str) -> Path:
    """A folder of programs that only write down what they were called with."""
    folder.mkdir(exist_ok=True)
    for name in names:
        path = folder / name
        path.write_text(
            f"#!/bin/sh\nprintf '%s\\0' {name} \"$@\" >>{folder}/log\nprintf '\\1' >>{folder}/log\n"
        )
        path.chmod(0o755)
    return folder


def without_path(text: str) -> str:
    """A hook that finds the stand-ins."""
    line = "PATH=/usr/sbin:/usr/bin:/sbin:/bin\n"
    assert text.count(line) == 1
    return text.replace(line, "")


def parses(shell: str, text: str) -> bool:
    return subprocess.run([shell, "-n"], input=text.encode(), capture_output=True).returncode == 0


# What targets' files say


def rendered(target: str, name: str) -> Rendering:
    wanted = options("pin-numa")
    machine = host_named("small-2n8c-2gpu")
    guest = vm_of_options(wanted, machine.architecture).guest
    plan = _plan(target).plan
    return target_named(target).render(plan, structs.replace(guest, name=name), machine, None, "vm")


@cache
def _plan(target: str):  # type: ignore[no-untyped-def]
    return written(target, "small-2n8c-2gpu", options("pin-numa"))


@pytest.mark.parametrize("target", ["qemu", "proxmox"])
def test_bash_reads_every_script_of_a_target(target: str) -> None:
    for name in NAMES:
        try:
            made = rendered(target, name)
        except InputError:
            assert not name.isprintable() or not name.strip(), name
            continue
        for text in (made.document, *(text for _, text in made.companions)):
            if text.startswith(b"#!"):
                assert parses("bash", text.decode()), name


# Hooks, units and scripts


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="needs systemd-analyze")
def test_systemd_starts_the_program_of_a_unit_whatever_its_folder_is_called(tmp_path: Path) -> None:
    units = {}
    for number, name in enumerate(SHELL_NAMES):
        if "/" in name or name in ("", ".", "..") or len(name) > 250:
            continue
        program = tmp_path / "programs" / name / "homenode"
        program.parent.mkdir(parents=True)
        program.write_text("#!/bin/sh\n")
        program.chmod(0o755)
        try:
            unit = systemd_unit([GPU], str(program))
        except UsageError:
            assert not name.isprintable() or set(name) & set("'\"\\"), name
            continue
        units[f"u{number}.service"] = name
        (tmp_path / f"u{number}.service").write_text(unit)
    assert len(units) > 30
    done = subprocess.run(
        ["systemd-analyze", "verify", *(str(tmp_path / unit) for unit in units)],
        capture_output=True,
        text=True,
        errors="replace",
    )
    about = [line for line in done.stderr.splitlines() if any(unit in line for unit in units)]
    assert about == []


def test_libvirts_hook_takes_no_vm_for_an_option(tmp_path: Path) -> None:
    stubs = stub(tmp_path / "bin", "homenode", "timeout", "logger")
    (stubs / "timeout").write_text('#!/bin/sh\nshift\nexec "$@"\n')
    (stubs / "logger").write_text("#!/bin/sh\nwhile read -r line; do :; done\n")
    hook = tmp_path / "hook"
    hook.write_text(without_path(libvirt_hook("homenode", 4)))
    for name in SHELL_NAMES:
        calls = run_shell(hook, name, "start", "begin", "-", shell="sh", stubs=stubs)
        asked = next(call for call in calls if call[0] == "homenode")
        assert asked == ["homenode", "doctor", "hook", "--target", "4", "--", name, "start"]


@pytest.mark.parametrize("name", NAMES, ids=ascii)
def test_the_hooks_of_slurm_take_a_plain_folder_alone(name: str) -> None:
    try:
        written_hooks = hooks(f"/{name}")
    except UsageError:
        return
    assert f"spool=/{name}\n" in written_hooks["prolog.sh"]
    assert shlex.quote(name) == name and shlex.split(f"/{name}") == [f"/{name}"]


ALONE = Experiment("shared-1gpu-n1-alone-r1", Mode.ALONE, ("n1",), "parts", 1, cpus=4, block=0)


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
    fields["shapes"] = (Shape(1, 1, gres=name),)
    for field, value in fields.items():
        is_plain = shlex.quote(name) == name and not name.startswith("-")
        assert options_refused(**{field: value}) or is_plain


def test_a_studys_script_passes_on_words_as_they_are(tmp_path: Path) -> None:
    stubs = stub(tmp_path / "bin", "scontrol", "squeue", "homenode", "hostname")
    for tool in ("mkdir", "date"):
        (stubs / tool).symlink_to(str(shutil.which(tool)))
    words = tuple(SHELL_NAMES)
    app = StudyOptions(
        tests=(), app=words, metric="".join(words), app_folder=str(tmp_path), homenode="homenode"
    )
    text = script_of(ALONE, app, "abc")
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


@given(st.text(st.characters(codec="utf-8", exclude_characters="\0"), min_size=1))
def test_a_word_of_slurms_files_is_read_as_it_was_written(value: str) -> None:
    try:
        line = f"Name=gpu {config_word('Type', value)} Count=2"
    except InputError:
        assert '"' in value or "\n" in value or "\r" in value
        return
    (read,) = parse_config(line, "x").lines
    assert read.words == (("name", "gpu"), ("type", value), ("count", "2"))


def test_names_of_slurms_files_stay_names() -> None:
    for name in NAMES:
        try:
            word = config_word("NodeName", name)
        except InputError:
            assert set(name) & set('"\n\r'), name
            continue
        (line,) = parse_config(f"{word} Sockets=1\n", "slurm.conf").lines
        assert line.words == (("nodename", name), ("sockets", "1"))


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
def test_words_of_a_line_are_replaced_by_their_place(
    pieces: list[str], comment: str, is_quoted: bool
) -> None:
    text = f"NodeName=a {''.join(pieces)}{comment}"
    (line,) = parse_config(text, "slurm.conf").lines
    wanted = {"Sockets": "4", "Gres": "gpu:8 x" if is_quoted else "gpu:8"}
    edited = "\n".join(with_words(text.split("\n"), wanted))
    (after,) = parse_config(edited, "slurm.conf").lines
    lower = {key.lower(): value for key, value in wanted.items()}
    kept = tuple((key, lower.get(key, value)) for key, value in line.words)
    missing = tuple((k, v) for k, v in lower.items() if k not in dict(line.words))
    assert after.words == kept + missing
    assert edited.endswith(comment)


def test_a_corrected_gres_conf_names_the_nodes_that_it_named() -> None:
    text = 'NodeName=gpu\\#1 Name=gpu Type=h100 File=/dev/nvidia[0-1] Flags="a \\# b"\n'
    (line,) = gres_lines(parse_config(text, "gres.conf"))
    assert list(line.nodes or ()) == ["gpu#1"]
    assert config_word("NodeName", "gpu#1") == "NodeName=gpu\\#1"


# Kubernetes


@pytest.mark.parametrize("name", ENCODED, ids=ascii)
def test_yaml_is_read_as_it_was_written(name: str) -> None:
    value = {"a": name, "b": [name, {name: name}], "c": f"{name}\n", "d": f"x\n{name}\n"}
    assert yaml.safe_load(yaml_text(value)) == value


@given(st.text(st.characters(codec="utf-8")))
def test_any_text_is_the_same_in_yaml(text: str) -> None:
    value = {"a": text, "b": [{"c": text}], "d": [text]}
    assert yaml.safe_load(yaml_text(value)) == value


@pytest.mark.parametrize(
    "field",
    ["vm", "namespace", "image", "bench_image", "gpu", "gpu_id", "kubevirt", "guest", "node"],
)
def test_manifests_hold_names_that_are_no_more_than_names(field: str) -> None:
    plain = manifests(ManifestOptions(), "hook")
    for name in NAMES:
        try:
            found = manifests(ManifestOptions(**{field: name}), "hook")  # type: ignore[arg-type]
        except UsageError:
            continue
        assert shlex.quote(name) == name and not name.startswith("-")
        for file, text in found.items():
            if file.endswith("Containerfile"):
                assert text.count("\n") == plain[file].count("\n")
            elif file.endswith(".yaml"):
                assert len(list(yaml.safe_load_all(text))) == plain[file].count("---\n") + 1


@pytest.mark.parametrize("word", SHELL_NAMES, ids=ascii)
def test_a_name_at_the_end_of_a_command_is_no_option(word: str) -> None:
    line = command_line("printf", "%s\\n", "x", *operands(word))
    said = subprocess.run(["bash", "-c", line], capture_output=True, check=True).stdout
    words = operands(word)
    assert words[-1] == word and (words[0] == "--") == word.startswith("-")
    assert said.split(b"\n", 2)[0] == b"x"
