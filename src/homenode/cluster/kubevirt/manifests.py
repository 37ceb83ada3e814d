"""Manifests: the objects that give a cluster's VMs the hook, and a job that measures them.

YAML in block style, because people edit the VM. Source: kubevirt.io/v1, hco.kubevirt.io/v1beta1,
KubeVirt cmd/sidecars (the shim), batch/v1, v1.
"""

import json
import re
from typing import Any

from homenode.cluster.arguments import (
    NATIVE_GATE,
    NATIVE_SINCE,
    SIDECAR_IMAGE,
    TESTED_VERSIONS,
    ManifestOptions,
    parse_version,
)
from homenode.cluster.kubevirt.object import format_yaml, read_manifest
from homenode.cluster.kubevirt.vmi import HOOK_ANNOTATION
from homenode.errors import UsageError, out_of_range
from homenode.machine.pci import NVIDIA
from homenode.package_data import read_package_text
from homenode.plan.shape.guest_numa import GRACE_GPUS
from homenode.process import CLOSED
from homenode.text import command_line

_IDS_HINT = "lspci -nn -d ::0302 on the node shows it in brackets: [10de:20b0]"
GATES = ("Sidecar", "CPUManager")
_DEFAULT_GPU, _DEFAULT_GPU_ID = ManifestOptions().gpu, "10DE:20B0"
GRACE_IDS = frozenset(f"{NVIDIA:04X}:{device_id:04X}" for device_id in GRACE_GPUS)
"""PCI ids of Grace GPUs, which the ConfigMap's script rejects."""
HOOK_FILE = "onDefineDomain"
NATIVE_GATES = (NATIVE_GATE, "CPUManager")
GATES_FILE, NATIVE_FILE, DEVICES_FILE = (
    "kubevirt-gates.tpl",
    "native-gates.tpl",
    "permitted-devices.tpl",
)
HOOK_PATH = f"/usr/bin/{HOOK_FILE}"
IMAGE_HOOK = """#!/usr/local/bin/python3 -I
import sys

from homenode.cli.main import main

sys.argv[1:1] = ["kubevirt", "on-define-domain"]
main()
"""
"""The hook of the image, which has homenode."""
_LARGEST = 1 << 20
_MAX_GPUS = 64
_GPUS_OF_NODE = 4
_LABEL = r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?"
_SPELLINGS = {
    "--vm": (_LABEL, "a name of lower-case letters, digits and '-'"),
    "--namespace": (_LABEL, "a name of lower-case letters, digits and '-'"),
    "--image": (r"[A-Za-z0-9][A-Za-z0-9._:/@-]{0,254}", "an image such as registry.example/h:1"),
    "--bench-image": (r"[A-Za-z0-9][A-Za-z0-9._:/@-]{0,254}", "an image such as r.example/b:1"),
    "--gpu-id": (r"[0-9A-Fa-f]{4}:[0-9A-Fa-f]{4}", "vendor and device such as 10DE:20B0"),
    "--gpu": (r"[A-Za-z0-9][A-Za-z0-9._/-]{0,316}", "a resource such as nvidia.com/GA100"),
    "--kubevirt": (
        r"v?1\.([6-9]|[1-9][0-9])([.-][A-Za-z0-9.-]{1,100})?",
        "a version from v1.6 on, such as v1.6.0",
    ),
    "--guest": (r"[A-Za-z0-9_][A-Za-z0-9._-]*@[A-Za-z0-9][A-Za-z0-9.:-]{0,252}", "user@host"),
}
"""Options end up in shell scripts and a Containerfile, where another text could be more."""

_PYTHON_IMAGE = "docker.io/library/python:3.12-slim"
_PYTHON_DIGEST = "sha256:229a2c5bfa27522db7815ea81f9bed70af17ccb9de9fc7ad142b1877b5830d36"
"""Image of Python 3.12.13, for all architectures; source: github.com/docker-library/repo-info."""


def render_manifests(options: ManifestOptions) -> dict[str, str]:
    """Return content by file name. Raises UsageError for options that no cluster takes."""
    _check_spellings(options)
    if options.gpu_id is None and options.gpu != _DEFAULT_GPU:
        raise UsageError(
            f"--gpu {options.gpu}: missing option --gpu-id VENDOR:DEVICE",
            hint=_IDS_HINT,
        )
    if _is_grace(options) and options.image is None:
        raise UsageError(
            f"--gpu-id {options.gpu_id}: a Grace GPU, which only the hook's image supports",
            hint=f"--image {SIDECAR_IMAGE}",
        )
    for name, number, largest in (
        ("--gpus", options.gpus, _MAX_GPUS),
        ("--vcpus", options.vcpus, _LARGEST),
        ("GiB of --memory", options.memory_gib, _LARGEST),
    ):
        if not 1 <= number <= largest:
            raise out_of_range(name, str(number), 1, largest)
    if options.image is None:
        files = {"hook-configmap.yaml": format_yaml(build_hook_configmap(options))}
    else:
        image = _render_file(
            "Containerfile",
            IMAGE=options.image,
            VERSION=options.kubevirt,
            BASE=_PYTHON_IMAGE,
            DIGEST=_PYTHON_DIGEST,
            HOOK=HOOK_FILE,
            PATH=HOOK_PATH,
            USER=USER,
        )
        files = {"Containerfile": image, HOOK_FILE: IMAGE_HOOK}
    return files | {
        GATES_FILE: _format_gates_template(GATES),
        "hyperconverged-gates.yaml": format_yaml(build_hyperconverged_patch()),
        DEVICES_FILE: _format_devices_template(options),
        "vm.yaml": format_yaml(build_virtual_machine(options)),
        "vm-hook.yaml": format_yaml(build_hook_patch(options)),
        **(render_native_files() if has_native(options) else {}),
        "bench.Containerfile": _render_file(
            "bench.Containerfile",
            IMAGE=options.bench_image,
            BASE=_PYTHON_IMAGE,
            DIGEST=_PYTHON_DIGEST,
            USER=USER,
        ),
        "bench-guest.yaml": format_yaml(build_results_claim(options), build_guest_job(options)),
    }


def render_native_files() -> dict[str, str]:
    """Return the patches for clusters whose KubeVirt places devices without the hook."""
    return {
        NATIVE_FILE: _format_gates_template(NATIVE_GATES),
        "hyperconverged-native.yaml": format_yaml(build_hyperconverged_patch(NATIVE_GATES)),
    }


def list_untested_parts(options: ManifestOptions) -> tuple[str, ...]:
    """Return warnings on options that are valid, and that homenode was not tested with."""
    version, warnings = parse_version(options.kubevirt), []
    if version is not None and version > TESTED_VERSIONS[1]:
        newest = "v{}.{}".format(*TESTED_VERSIONS[1])
        warnings.append(f"--kubevirt {options.kubevirt}: tested up to {newest}")
    if options.gpus > _GPUS_OF_NODE and options.vcpus % 2:
        warnings.append(
            f"--vcpus {options.vcpus}: two guest nodes divide only an even number; the guest has "
            "one socket"
        )
    elif options.vcpus % 4 and options.vcpus > 1 and options.gpus > _GPUS_OF_NODE:
        warnings.append(
            f"--vcpus {options.vcpus}: not a multiple of 4, two sockets of cores with two threads; "
            "the guest sees siblings of a core as two cores"
        )
    return tuple(warnings)


def has_native(options: ManifestOptions) -> bool:
    """Return whether the cluster's KubeVirt has the gate that places devices without the hook."""
    version = parse_version(options.kubevirt)
    return version is not None and version >= NATIVE_SINCE


def list_next_steps(options: ManifestOptions, directory: str) -> tuple[tuple[str, str], ...]:
    """Return the next steps in order: (name of the step, command or condition)."""
    at = f"{directory.rstrip('/') or '/'}/"
    namespace = ("-n", options.namespace)

    cr = ("kubevirt", "kubevirt", "-n", "kubevirt")

    def patch_cr(name: str, template: str) -> tuple[tuple[str, str], ...]:
        """Lists in a CR are replaced as a whole, so the patch is made from the CR's own."""
        command = command_line("kubectl", "get", *cr, "-o", f"go-template-file={at}{template}")
        words = ("kubectl", "patch", *cr, "--type", "merge", "--patch-file", "/dev/stdin")
        return (name, f"{command} |"), ("", f"  {command_line(*words)}")

    image = options.image or ""
    hook = command_line(*"kubectl apply --server-side -f".split(), f"{at}hook-configmap.yaml")
    wheel: tuple[tuple[str, str], ...] = ()
    if image:
        build = command_line("podman", "build", "-t", image, directory)
        hook = f"{build} && {command_line('podman', 'push', image)}"
        wheel = (("wheel", f"copy homenode's wheel and its packaging/runtime.lock to {at}"),)
    native = (
        ("1.8 on", f"either {NATIVE_GATE} (Alpha), and no hook in the VM's annotations"),
        ("", f"(of HyperConverged: {at}hyperconverged-native.yaml):"),
        *patch_cr("", NATIVE_FILE),
        ("", command_line("virtctl", "restart", options.vm, *namespace)),
        ("", "or the gates and the hook:"),
    )
    vm_hook = ("--type", "merge", "--patch-file", f"{at}vm-hook.yaml")
    logs = command_line("kubectl", "logs", *namespace, "-l", f"vm.kubevirt.io/name={options.vm}")
    return (
        ("HCO", "if HyperConverged owns the CR, it reverts these patches: use instead"),
        ("", f"{at}hyperconverged-gates.yaml, and its permittedHostDevices"),
        ("GPUs", f"if NVIDIA's operator announces {options.gpu}, set $external in the file:"),
        *patch_cr("", DEVICES_FILE),
        *(native if has_native(options) else ()),
        *patch_cr("gates", GATES_FILE),
        *wheel,
        ("hook", hook),
        ("VM", command_line("kubectl", "patch", "vm", options.vm, *namespace, *vm_hook)),
        ("", command_line("virtctl", "restart", options.vm, *namespace)),
        # virtctl start would be rejected: with RerunOnFailure the VM starts at once.
        ("", f"or, for a new VM, which starts from the claim {options.vm}-root:"),
        ("", command_line("kubectl", "create", "-f", f"{at}vm.yaml")),
        # Events only report that the VM could not be defined.
        ("log", f"{logs} -c hook-sidecar-0"),
        ("guest", "cat /sys/bus/pci/devices/*/numa_node"),
    )


def _check_spellings(options: ManifestOptions) -> None:
    for option, (pattern, expected) in _SPELLINGS.items():
        text = getattr(options, option[2:].replace("-", "_"))
        if text is not None and re.fullmatch(pattern, text, re.ASCII) is None:
            hint = _IDS_HINT if option == "--gpu-id" else None
            raise UsageError(f"{option}: expected {expected}, found {text[:60]!r}", hint=hint)


def format_hook_annotation(options: ManifestOptions) -> str:
    """Return the value of hooks.kubevirt.io/hookSidecars."""
    sidecar: dict[str, Any] = {"args": ["--version", str(options.hook_version)]}
    if options.image is None:
        sidecar["configMap"] = {
            "name": _format_configmap_name(options),
            "key": HOOK_FILE,
            "hookPath": HOOK_PATH,
        }
    else:
        sidecar |= {"image": options.image, "imagePullPolicy": "IfNotPresent"}
    return json.dumps([sidecar])


def build_hook_patch(options: ManifestOptions) -> dict[str, Any]:
    """Return the merge patch that adds the hook to an existing VM."""
    annotations = {HOOK_ANNOTATION: format_hook_annotation(options), "homenode/on-error": "fail"}
    return {"spec": {"template": {"metadata": {"annotations": annotations}}}}


def _is_grace(options: ManifestOptions) -> bool:
    return (options.gpu_id or _DEFAULT_GPU_ID).upper() in GRACE_IDS


def _format_configmap_name(options: ManifestOptions) -> str:
    return f"{options.vm}-hook"


def build_hook_configmap(options: ManifestOptions) -> dict[str, Any]:
    """Return the hook as one script, which KubeVirt puts at hookPath in its own sidecar image."""
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": _format_configmap_name(options), "namespace": options.namespace},
        "data": {
            HOOK_FILE: read_package_text("cluster", "kubevirt", "files", "on_define_domain.py")
        },
    }


def _format_devices_template(options: ManifestOptions) -> str:
    gpu_id = options.gpu_id or _DEFAULT_GPU_ID
    return _render_file(DEVICES_FILE, GPU=options.gpu, UPPER=gpu_id.upper(), LOWER=gpu_id.lower())


def _format_gates_template(gates: tuple[str, ...]) -> str:
    quoted_gates = [json.dumps(gate) for gate in gates]
    return _render_file("gates.tpl", WORDS=" ".join(quoted_gates), LIST=", ".join(quoted_gates))


def build_hyperconverged_patch(gates: tuple[str, ...] = GATES) -> dict[str, Any]:
    """Return a merge patch for clusters whose KubeVirt CR belongs to the HyperConverged operator.
    Its annotation is a JSON patch, which extends the operator's gates."""
    path = "/spec/configuration/developerConfiguration/featureGates/-"
    patch = [{"op": "add", "path": path, "value": gate} for gate in gates]
    return {"metadata": {"annotations": {"kubevirt.kubevirt.io/jsonpatch": json.dumps(patch)}}}


def build_virtual_machine(options: ManifestOptions) -> dict[str, Any]:
    """Return a VM whose guest has the nodes' cells, and the hook. If the VM has more GPUs than one
    NUMA node of a common board, they come from both packages, so the guest has two sockets."""
    sockets = 2 if options.gpus > _GPUS_OF_NODE and options.vcpus % 2 == 0 else 1
    threads = 2 if options.vcpus % (2 * sockets) == 0 and not _is_grace(options) else 1
    vm = _build_document(
        "vm.yaml",
        VM=options.vm,
        NAMESPACE=options.namespace,
        CORES=options.vcpus // (sockets * threads),
        THREADS=threads,
        SOCKETS=sockets,
        GIB=options.memory_gib,
    )
    template = vm["spec"]["template"]
    if _is_grace(options):
        template["spec"] = {"architecture": "arm64", **template["spec"]}
        template["spec"]["domain"]["machine"]["type"] = "virt"
    template["metadata"]["annotations"][HOOK_ANNOTATION] = format_hook_annotation(options)
    template["spec"]["domain"]["devices"]["gpus"] = [
        {"name": f"gpu{i}", "deviceName": options.gpu} for i in range(options.gpus)
    ]
    return vm


USER = 1001
"""The image's user: not root, and with a name, which ssh requires."""

MAX_S = 6 * 3600
"""A guest that never ends ends here."""


def _render_file(name: str, **values: object) -> str:
    """Return a file of files/, each @NAME@ in it replaced by its value."""
    text = read_package_text("cluster", "kubevirt", "files", name)
    for word, value in values.items():
        text = text.replace(f"@{word}@", str(value))
    return text


def _build_document(name: str, **values: object) -> dict[str, Any]:
    return dict(read_manifest(_render_file(name, **values).encode(), name, "an object"))


GUEST_SCRIPT = _render_file("bench-guest.sh", SSH=" ".join(CLOSED))
"""The script of the job. Each run has a name of its own, so that a job that is applied again adds
one."""


def build_results_claim(options: ManifestOptions) -> dict[str, Any]:
    """Return the volume claim for the results of all jobs."""
    return {
        "apiVersion": "v1",
        "kind": "PersistentVolumeClaim",
        "metadata": {"name": "homenode-results", "namespace": options.namespace},
        "spec": {"accessModes": ["ReadWriteMany"], "resources": {"requests": {"storage": "1Gi"}}},
    }


def build_guest_job(options: ManifestOptions) -> dict[str, Any]:
    """Return the job that runs the suite in the guest over ssh and fetches its results."""
    job = _build_job(options, f"homenode-bench-{options.vm}", ["sh", "-c", GUEST_SCRIPT])
    pod = job["spec"]["template"]["spec"]
    container = pod["containers"][0]
    container["env"] = [
        {"name": "GUEST", "value": options.guest or f"cloud@{options.vm}"},
        {"name": "NAME", "value": options.vm},
    ]
    container["volumeMounts"].append({"name": "ssh", "mountPath": "/ssh", "readOnly": True})
    pod["volumes"].append(
        {"name": "ssh", "secret": {"secretName": "homenode-ssh", "defaultMode": 0o440}}
    )
    return job


def _build_job(options: ManifestOptions, name: str, command: list[str]) -> dict[str, Any]:
    job = _build_document(
        "job.yaml",
        NAME=name,
        NAMESPACE=options.namespace,
        SECONDS=MAX_S,
        USER=USER,
        IMAGE=options.bench_image,
    )
    job["spec"]["template"]["spec"]["containers"][0]["command"] = command
    return job
