"""Manifests: whole, of known fields, and read back by others as they were meant."""

import json
from pathlib import Path

import pytest
import yaml

from homenode.cluster.arguments import HookVersion, ManifestOptions
from homenode.cluster.kubevirt.manifests import (
    GATES,
    build_guest_job,
    build_hook_configmap,
    build_hook_patch,
    build_hyperconverged_patch,
    build_results_claim,
    build_virtual_machine,
    format_hook_annotation,
    list_next_steps,
    list_untested_parts,
    render_manifests,
)
from homenode.cluster.kubevirt.object import format_yaml
from homenode.errors import UsageError

OPTIONS = ManifestOptions(image="r.example/h:1")


@pytest.mark.parametrize("version", HookVersion)
def test_the_annotation_is_the_hook_s_list_for_every_version(version: HookVersion) -> None:
    options = ManifestOptions(image="r.example/h:1", hook_version=version)
    text = format_yaml(build_hook_patch(options))
    assert max(map(len, text.splitlines())) < 100
    assert yaml.safe_load(text) == build_hook_patch(options)
    (sidecar,) = json.loads(format_hook_annotation(options))
    assert sidecar == {
        "args": ["--version", str(version)],
        "image": "r.example/h:1",
        "imagePullPolicy": "IfNotPresent",
    }


@pytest.mark.parametrize(
    ("gpus", "vcpus", "topology"),
    [(8, 96, (2, 24, 2)), (4, 96, (1, 48, 2)), (8, 94, (2, 47, 1)), (8, 95, (1, 95, 1))],
)
def test_two_packages_are_sockets(gpus: int, vcpus: int, topology: tuple[int, int, int]) -> None:
    vm = build_virtual_machine(ManifestOptions(gpus=gpus, vcpus=vcpus))
    cpu = vm["spec"]["template"]["spec"]["domain"]["cpu"]
    assert (cpu["sockets"], cpu["cores"], cpu["threads"]) == topology
    assert cpu["maxSockets"] == cpu["sockets"]


def test_a_grace_gpu_needs_the_image_and_an_arm_vm_without_siblings() -> None:
    gpu = {"gpu": "nvidia.com/GH200", "gpu_id": "10de:2342"}
    with pytest.raises(UsageError, match="only the hook's image"):
        render_manifests(ManifestOptions(**gpu))  # type: ignore[arg-type]
    options = ManifestOptions(image="r.example/h:1", **gpu)  # type: ignore[arg-type]
    spec = build_virtual_machine(options)["spec"]["template"]["spec"]
    assert (spec["architecture"], spec["domain"]["machine"]["type"]) == ("arm64", "virt")
    assert spec["domain"]["cpu"]["threads"] == 1


def test_the_operator_s_annotation_adds_to_the_gates_that_there_are() -> None:
    annotations = build_hyperconverged_patch()["metadata"]["annotations"]
    patch = json.loads(annotations["kubevirt.kubevirt.io/jsonpatch"])
    assert [step["value"] for step in patch] == list(GATES)
    assert all(step["op"] == "add" and step["path"].endswith("/-") for step in patch)


def test_the_sidecars_image_is_kubevirts_with_the_hook_in_it() -> None:
    files = render_manifests(OPTIONS)
    lines = [line for line in files["Containerfile"].splitlines() if not line.startswith("#")]
    assert "FROM quay.io/kubevirt/sidecar-shim:${KUBEVIRT} AS shim" in lines
    assert "COPY --from=shim /sidecar-shim /sidecar-shim" in lines
    assert "COPY --chmod=0755 onDefineDomain /usr/bin/onDefineDomain" in lines
    assert any("--require-hashes -r /tmp/runtime.lock" in line for line in lines)
    assert lines[-1] == 'ENTRYPOINT ["/sidecar-shim"]'
    assert '"kubevirt", "on-define-domain"' in files["onDefineDomain"]


def test_the_jobs_image_installs_by_hash_what_it_runs_with() -> None:
    lines = render_manifests(OPTIONS)["bench.Containerfile"].splitlines()
    assert any(line.startswith("RUN pip install") and "--require-hashes" in line for line in lines)
    assert any("pip install" in line and "--no-deps --no-index" in line for line in lines)
    assert not any(line.startswith("USER root") for line in lines)
    # ssh for the guest's job, and what the suite and a capture ask on a node.
    assert any("openssh-client numactl pciutils" in line for line in lines)


def test_a_configmap_holds_the_hook_and_the_vm_names_it() -> None:
    options = ManifestOptions(namespace="gpu", vm="big")
    files = render_manifests(options)
    assert "Containerfile" not in files and "onDefineDomain" not in files
    (sidecar,) = json.loads(format_hook_annotation(options))
    configmap = build_hook_configmap(options)
    assert sidecar == {
        "args": ["--version", "v1alpha3"],
        "configMap": {
            "name": configmap["metadata"]["name"],
            "key": next(iter(configmap["data"])),
            "hookPath": "/usr/bin/onDefineDomain",
        },
    }
    assert configmap["metadata"]["namespace"] == "gpu"
    assert "image" not in format_hook_annotation(options)


def test_every_step_names_a_file_that_is_written_from_where_the_command_was_run() -> None:
    for options in (OPTIONS, ManifestOptions(kubevirt="v1.9.0", namespace="gpu")):
        steps = [text for _, text in list_next_steps(options, "my cluster/")]
        whole = "\n".join(steps)
        named = {name for name in render_manifests(options) if f"my cluster/{name}" in whole}
        assert {"kubevirt-gates.tpl", "permitted-devices.tpl", "vm.yaml"} <= named
        assert "vm-hook.yaml" in named, "a VM that exists"
        assert max(map(len, steps)) <= 110
        assert any("kubectl logs" in step and "-n " in step for step in steps)
        assert ("native-gates.tpl" in named) == (options.kubevirt == "v1.9.0")


def test_a_gpu_of_another_kind_needs_its_own_pci_id() -> None:
    with pytest.raises(UsageError, match="missing option --gpu-id"):
        render_manifests(ManifestOptions(gpu="nvidia.com/GH100"))
    files = render_manifests(ManifestOptions(gpu="nvidia.com/GH100", gpu_id="10de:2330"))
    assert "10DE:2330" in files["permitted-devices.tpl"]


@pytest.mark.parametrize("version", ["latest", "v2", "v1.5.0"])
def test_a_version_that_has_not_the_hooks_interface_is_a_usage_error(version: str) -> None:
    with pytest.raises(UsageError, match="--kubevirt: expected a version"):
        render_manifests(ManifestOptions(kubevirt=version))


@pytest.mark.parametrize(
    ("options", "warned"),
    [
        (ManifestOptions(kubevirt="v1.9.3"), []),
        (ManifestOptions(kubevirt="v1.10.0"), ["--kubevirt"]),
        (ManifestOptions(vcpus=7), ["--vcpus"]),
        (ManifestOptions(vcpus=7, gpus=2), []),
        (ManifestOptions(vcpus=150), ["--vcpus"]),
        (ManifestOptions(vcpus=150, gpus=4), []),
    ],
)
def test_untested_settings_are_warnings(options: ManifestOptions, warned: list[str]) -> None:
    assert [warning.split()[0] for warning in list_untested_parts(options)] == warned


def test_the_operator_s_patch_has_the_gate_that_replaces_the_hook() -> None:
    files = render_manifests(ManifestOptions(kubevirt="v1.8.0"))
    assert "PCINUMAAwareTopology" in files["hyperconverged-native.yaml"]
    assert "Sidecar" not in files["hyperconverged-native.yaml"]
    assert "hyperconverged-native.yaml" not in render_manifests(ManifestOptions(kubevirt="v1.7.0"))


@pytest.mark.parametrize("options", [{"gpus": 0}, {"vcpus": -1}, {"memory_gib": 1 << 40}])
def test_counts_that_no_vm_has_are_a_usage_error(options: dict[str, int]) -> None:
    with pytest.raises(UsageError, match="is out of range"):
        render_manifests(ManifestOptions(**options))  # type: ignore[arg-type]


def test_yaml_readers_and_kubernetes_schema_take_every_file() -> None:
    reason = "kubernetes-validate is not here"
    kubernetes_validate = pytest.importorskip("kubernetes_validate", reason=reason)
    odd = ManifestOptions(image="1.5", vm="on", namespace="1e3", gpu="0x10", gpu_id="10de:2330")
    for options in (OPTIONS, odd):
        files = render_manifests(options)
        claim = build_results_claim(options)
        expected = {
            "vm.yaml": [build_virtual_machine(options)],
            "bench-guest.yaml": [claim, build_guest_job(options)],
            "hyperconverged-gates.yaml": [build_hyperconverged_patch()],
        }
        for name, documents in expected.items():
            assert list(yaml.safe_load_all(files[name])) == documents
    for document in (build_results_claim(OPTIONS), build_guest_job(OPTIONS)):
        version = kubernetes_validate.latest_version()
        kubernetes_validate.validate(document, version, strict=True)


def test_the_job_has_no_rights_beyond_its_volume() -> None:
    """As the profile "restricted" asks."""
    pod = build_guest_job(OPTIONS)["spec"]["template"]["spec"]
    assert pod["automountServiceAccountToken"] is False
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    for container in pod["containers"]:
        context = container["securityContext"]
        assert context["allowPrivilegeEscalation"] is False
        assert context["capabilities"] == {"drop": ["ALL"]}


def test_every_file_is_named_in_the_documentation() -> None:
    page = Path(__file__).parents[2] / "docs" / "reference" / "commands" / "kubevirt.md"
    text = page.read_text(encoding="utf-8")
    names = render_manifests(OPTIONS).keys() | render_manifests(ManifestOptions())
    assert not [name for name in names if f"`{name}`" not in text]
