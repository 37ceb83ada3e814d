"""Manifests against KubeVirt's published schema, and jobs against the shell that runs them."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from homenode.cli.main import BENCH
from homenode.cluster.arguments import ManifestOptions
from homenode.cluster.kubevirt.manifests import (
    GATES,
    GUEST_SCRIPT,
    build_virtual_machine,
    render_manifests,
)
from homenode.errors import UsageError
from homenode.measure.results.store import run_text
from tests.command_line import homenode
from tests.processes import write_program
from tests.report_runs import full_run
from tests.ssh_targets import new_key, ssh_target

SCHEMA = Path(__file__).parents[1] / "kubevirt_v1.schema.json"
STAND_IN = """#!/bin/sh
echo "$@" >> "$LOG"
test "$1 $2" = "kubevirt receive" && exec "$HOMENODE" "$@"
test "$1 $2" = "bench --name" && test "$4" = --results || exit 2
mkdir -p "$5/nvidia-h100/$3" && sed "s/RUN/$3/" "$RUN" > "$5/nvidia-h100/$3/results.jsonl"
exit "$CODE"
"""
SSH = """#!/bin/sh
while [ "$1" != -- ]; do shift; done
test "$2" = cloud@gpu-vm || exit 9
cd "$GUEST_HOME" && exec sh -c "$3"
"""


def errors(kind: str, document: Mapping[str, Any]) -> list[str]:
    jsonschema = pytest.importorskip("jsonschema", reason="jsonschema is not here")
    schema = json.loads(SCHEMA.read_text()) | {"$ref": f"#/$defs/{kind}"}
    found = jsonschema.Draft202012Validator(schema).iter_errors(document)
    return [f"{error.json_path}: {error.message}" for error in found]


@pytest.mark.parametrize("options", [ManifestOptions(), ManifestOptions(gpus=1, vm="on")])
def test_the_vm_is_what_kubevirt_s_schema_says_a_vm_is(options: ManifestOptions) -> None:
    assert errors("V1VirtualMachine", build_virtual_machine(options)) == []


def test_the_schema_finds_misspelt_fields_wrong_types_and_missing_ones() -> None:
    vm = build_virtual_machine(ManifestOptions())
    domain = vm["spec"]["template"]["spec"]["domain"]
    domain["cpu"]["numa"]["guestmappingPassthrough"] = {}
    domain["cpu"]["cores"] = "96"
    del domain["devices"]["gpus"][0]["name"]
    found = errors("V1VirtualMachine", vm)
    assert len(found) == 3
    assert any("guestmappingPassthrough" in error for error in found)


@pytest.mark.parametrize("before", [{}, {"developerConfiguration": {"featureGates": ["Root"]}}])
def test_the_schema_takes_the_templates_patches(before: dict[str, Any], tmp_path: Path) -> None:
    if shutil.which("kubectl") is None:
        pytest.skip("no kubectl here")
    cr = {"apiVersion": "kubevirt.io/v1", "kind": "KubeVirt", "spec": {"configuration": before}}
    cr |= {"metadata": {"name": "kubevirt", "resourceVersion": "7"}}
    (tmp_path / "cr.json").write_text(json.dumps(cr))
    patches = {}
    for name, text in render_manifests(ManifestOptions(kubevirt="v1.8.4")).items():
        if name.endswith(".tpl"):
            (tmp_path / name).write_text(text)
            argv = ["kubectl", "annotate", "--local", "-f", f"{tmp_path}/cr.json", "a=b"]
            argv += ["-o", f"go-template-file={tmp_path}/{name}"]
            done = subprocess.run(argv, capture_output=True, text=True, check=True, timeout=60)
            patches[name] = json.loads(done.stdout)
            assert errors("V1KubeVirt", cr | {"spec": patches[name]["spec"]}) == []
            assert patches[name]["metadata"] == {"resourceVersion": "7"}
    configuration = patches["kubevirt-gates.tpl"]["spec"]["configuration"]
    listed = configuration["developerConfiguration"]["featureGates"]
    assert listed == [*(["Root"] if before else []), *GATES]


@pytest.mark.parametrize(
    "options",
    [
        {"vm": "a'; rm -rf ~; '"},
        {"vm": "GPU"},
        {"namespace": "a b"},
        {"image": "r/h\nRUN curl"},
        {"kubevirt": "v1\nUSER root"},
        {"guest": "-oProxyCommand=x@h"},
        {"guest": "gpu-vm"},
        {"gpu": "a: b"},
    ],
)
def test_names_that_are_more_than_names_are_refused_by_option(options: dict[str, str]) -> None:
    (option,) = options
    with pytest.raises(UsageError, match=f"--{option}: expected"):
        render_manifests(ManifestOptions(**options))  # type: ignore[arg-type]


def run_job(script: str, tmp_path: Path, code: int) -> subprocess.CompletedProcess[str]:
    """A job's script with stand-ins for homenode and ssh; its volume is tmp_path/results."""
    programs, guest = tmp_path / "bin", tmp_path / "guest"
    for directory in (guest, tmp_path / "results"):
        directory.mkdir(exist_ok=True)
    for name, text in (("homenode", STAND_IN), ("ssh", SSH)):
        write_program(programs / name, text)
    run = full_run("pin", 1, system="nvidia-h100", name="RUN")
    (tmp_path / "run.jsonl").write_text(run_text(run))
    environment = {
        "RUN": f"{tmp_path}/run.jsonl",
        "HOMENODE": str(Path(sys.executable).with_name("homenode")),
        "PATH": f"{programs}:{os.environ['PATH']}",
        "LOG": str(tmp_path / "log"),
        "CODE": str(code),
        "GUEST": "cloud@gpu-vm",
        "NAME": "gpu-vm",
        "GUEST_HOME": str(guest),
    }
    argv = ["sh", "-c", script.replace("/results", f"{tmp_path}/results")]
    return subprocess.run(argv, env=environment, capture_output=True, text=True, timeout=300)


@pytest.mark.parametrize(("code", "ends"), [(0, 0), (1, 0), (3, 3)])
def test_a_job_fails_only_without_a_measurement(code: int, ends: int, tmp_path: Path) -> None:
    done = run_job(GUEST_SCRIPT, tmp_path, code)
    assert done.returncode == ends, done.stderr
    (run,) = (tmp_path / "results").glob("*/*/results.jsonl")
    assert run.parent.parent.name == "nvidia-h100"
    assert run.parent.name.startswith("gpu-vm-20")


def test_homenode_takes_the_arguments_that_a_job_gives_it(tmp_path: Path) -> None:
    run_job(GUEST_SCRIPT, tmp_path, 0)
    arguments = (tmp_path / "log").read_text().splitlines()[0].split()
    done = homenode(*arguments, "--help")
    assert done.exit_code == 0
    known = {name for parameter in BENCH.parameters for name in parameter.opt.names}
    assert all(word in known for word in arguments if word.startswith("--"))


@pytest.mark.nightly
@pytest.mark.root
def test_the_jobs_of_a_vm_know_its_guest_again_and_refuse_another(tmp_path: Path) -> None:
    """A real sshd in the guest's place. Each job is a new pod: only the volume stays."""
    (tmp_path / "results").mkdir()
    guest = tmp_path / "guest"
    guest.mkdir()
    with ssh_target(guest) as target:
        text = f'#!/bin/sh\nexec /usr/bin/ssh -F none -p {target.port} "$@"\n'
        write_program(tmp_path / "bin/ssh", text)
        secret = tmp_path / "secret"
        secret.mkdir()
        shutil.copy(guest / "user_key", secret / "key")
        login = GUEST_SCRIPT[: GUEST_SCRIPT.index("name=")] + "run 'echo there'\n"
        for path in ("results", "ssh"):
            real = tmp_path / path if path == "results" else secret
            login = login.replace(f"/{path}/", f"{real}/")

        def job() -> subprocess.CompletedProcess[str]:
            path = f"{tmp_path}/bin:/usr/bin:/bin"
            given = {"PATH": path, "GUEST": "root@127.0.0.1", "NAME": "gpu-vm"}
            argv = ["sh", "-c", login]
            return subprocess.run(argv, env=given, capture_output=True, text=True, timeout=120)

        for _ in range(2):
            assert job().stdout == "there\n"
        (kept,) = (tmp_path / "results").iterdir()
        assert kept.name == ".known_hosts-gpu-vm"
        assert kept.read_text().startswith("gpu-vm ssh-ed25519 ")
        for kind in ("ed25519", "ecdsa"):
            new_key(guest / "host_key", kind)
            refused = job()
            assert refused.returncode == 3 and refused.stdout == ""
            assert str(kept) in refused.stderr and "installed anew" in refused.stderr
        # What the secret says comes first, and nothing is kept then.
        kept.unlink()
        public = (guest / "host_key.pub").read_text()
        (secret / "known_hosts").write_text(f"127.0.0.1 {public}")
        assert job().stdout == "there\n"
        new_key(guest / "host_key")
        assert job().returncode == 3
        assert not list((tmp_path / "results").iterdir())
