"""Manifests: what a cluster needs so that its VMs get the hook, and a job that measures them.

Source: kubevirt.io/v1 (VirtualMachine, KubeVirt), hco.kubevirt.io/v1beta1 (HyperConverged),
batch/v1 (Job); KubeVirt cmd/sidecars for the shim.
"""

import json
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from homenode.errors import UsageError
from homenode.kubevirt.yaml_text import yaml_text

GATES = ("Sidecar", "CPUManager")
_GATES_PATH = "/spec/configuration/developerConfiguration/featureGates"
_LARGEST = 1 << 20

USER = 1001
"""Of the image: not root, and with a name, which ssh asks for."""


class HookVersion(StrEnum):
    """Versions of the hook's protocol. v1alpha3 ends the sidecar with the VM."""

    V1ALPHA1 = "v1alpha1"
    V1ALPHA2 = "v1alpha2"
    V1ALPHA3 = "v1alpha3"


@dataclass(frozen=True, slots=True)
class ManifestWishes:
    """image: where the sidecar's image will be. gpu: the resource's name. memory_gib, vcpus, gpus:
    of the example VM. guest: user@host of the VM to measure over ssh."""

    image: str = "registry.example/homenode-sidecar:latest"
    namespace: str = "default"
    vm: str = "gpu-vm"
    gpu: str = "nvidia.com/GA100_A100_SXM4_40GB"
    gpus: int = 8
    vcpus: int = 96
    memory_gib: int = 512
    hook_version: HookVersion = HookVersion.V1ALPHA3
    kubevirt: str = "v1.6.0"
    guest: str = "cloud@gpu-vm"
    node: str | None = None


def manifests(wishes: ManifestWishes) -> dict[str, str]:
    """File name -> content. Raises UsageError for wishes that no VM can have."""
    for name, number in (
        ("--gpus", wishes.gpus), ("--vcpus", wishes.vcpus), ("--memory-gib", wishes.memory_gib),
    ):  # fmt: skip
        if not 1 <= number <= _LARGEST:
            raise UsageError(f"{name}: expected 1 to {_LARGEST}, found {number}")
    return {
        "Containerfile": _containerfile(wishes),
        "kubevirt-gates.json": json.dumps(gate_patch(), indent=2) + "\n",
        "hyperconverged-gates.yaml": yaml_text(hyperconverged_patch()),
        "vm.yaml": yaml_text(virtual_machine(wishes)),
        "bench-guest.yaml": yaml_text(results_claim(wishes), guest_job(wishes)),
        "bench-node.yaml": yaml_text(results_claim(wishes), node_job(wishes)),
    }


def hook_annotation(wishes: ManifestWishes) -> str:
    """The value of hooks.kubevirt.io/hookSidecars."""
    return json.dumps(
        [
            {
                "args": ["--version", str(wishes.hook_version)],
                "image": wishes.image,
                "imagePullPolicy": "IfNotPresent",
            }
        ]
    )


def gate_patch() -> list[dict[str, str]]:
    """A JSON patch that adds to the gates of a KubeVirt CR and keeps those that are there."""
    return [{"op": "add", "path": f"{_GATES_PATH}/-", "value": gate} for gate in GATES]


def hyperconverged_patch() -> dict[str, Any]:
    """The same for clusters whose KubeVirt CR belongs to the HyperConverged operator."""
    return {
        "metadata": {"annotations": {"kubevirt.kubevirt.io/jsonpatch": json.dumps(gate_patch())}}
    }


def virtual_machine(wishes: ManifestWishes) -> dict[str, Any]:
    """A VM whose guest has the nodes' cells, and the hook."""
    return {
        "apiVersion": "kubevirt.io/v1",
        "kind": "VirtualMachine",
        "metadata": {"name": wishes.vm, "namespace": wishes.namespace},
        "spec": {
            "runStrategy": "RerunOnFailure",
            "template": {
                "metadata": {
                    "labels": {"kubevirt.io/vm": wishes.vm},
                    "annotations": {
                        "hooks.kubevirt.io/hookSidecars": hook_annotation(wishes),
                        "homenode/on-error": "fail",
                    },
                },
                "spec": {
                    "domain": {
                        "machine": {"type": "q35"},
                        "cpu": {
                            "cores": wishes.vcpus,
                            "sockets": 1,
                            "threads": 1,
                            "model": "host-passthrough",
                            "dedicatedCpuPlacement": True,
                            "isolateEmulatorThread": True,
                            "numa": {"guestMappingPassthrough": {}},
                        },
                        "memory": {
                            "guest": f"{wishes.memory_gib}Gi",
                            "hugepages": {"pageSize": "1Gi"},
                        },
                        "devices": {
                            "gpus": [
                                {"name": f"gpu{i}", "deviceName": wishes.gpu}
                                for i in range(wishes.gpus)
                            ],
                            "disks": [{"name": "root", "disk": {"bus": "virtio"}}],
                            "interfaces": [{"name": "default", "masquerade": {}}],
                        },
                    },
                    "networks": [{"name": "default", "pod": {}}],
                    "terminationGracePeriodSeconds": 180,
                    "volumes": [
                        {
                            "name": "root",
                            "persistentVolumeClaim": {"claimName": f"{wishes.vm}-root"},
                        }
                    ],
                },
            },
        },
    }


def results_claim(wishes: ManifestWishes) -> dict[str, Any]:
    """Where the jobs of all VMs and nodes leave their results."""
    return {
        "apiVersion": "v1",
        "kind": "PersistentVolumeClaim",
        "metadata": {"name": "homenode-results", "namespace": wishes.namespace},
        "spec": {
            "accessModes": ["ReadWriteMany"],
            "resources": {"requests": {"storage": "1Gi"}},
        },
    }


def guest_job(wishes: ManifestWishes) -> dict[str, Any]:
    """Runs the suite in the guest over ssh, and fetches what it wrote."""
    script = (
        "set -eu\n"
        'run="ssh -i /ssh/key -o StrictHostKeyChecking=accept-new '
        '-o UserKnownHostsFile=/tmp/known $GUEST"\n'
        '$run "mkdir -p homenode && cd homenode && homenode bench $NAME"\n'
        '$run "tar -C homenode -cf - results" | tar -C /results --strip-components=1 -xf -\n'
    )
    job = _job(wishes, f"homenode-bench-{wishes.vm}", ["sh", "-c", script])
    pod = job["spec"]["template"]["spec"]
    container = pod["containers"][0]
    container["env"] = [
        {"name": "GUEST", "value": wishes.guest},
        {"name": "NAME", "value": wishes.vm},
    ]
    container["volumeMounts"].append({"name": "ssh", "mountPath": "/ssh", "readOnly": True})
    pod["volumes"].append(
        {"name": "ssh", "secret": {"secretName": "homenode-ssh", "defaultMode": 0o440}}
    )
    # The key belongs to root and is read through the group: then ssh does not mind its mode.
    pod["securityContext"] = {"runAsUser": USER, "fsGroup": USER}
    return job


def node_job(wishes: ManifestWishes) -> dict[str, Any]:
    """Runs the suite on a node itself, with all of its GPUs: what the VM is held against."""
    script = (
        'set -eu\ncd /tmp\nhomenode bench "$NAME"\n'
        "tar -cf - results | tar -C /results --strip-components=1 -xf -\n"
    )
    job = _job(wishes, "homenode-bench-node", ["sh", "-c", script])
    pod = job["spec"]["template"]["spec"]
    container = pod["containers"][0]
    container["env"] = [{"name": "NAME", "valueFrom": {"fieldRef": {"fieldPath": "spec.nodeName"}}}]
    container["resources"] = {"limits": {"nvidia.com/gpu": str(wishes.gpus)}}
    if wishes.node is not None:
        pod["nodeSelector"] = {"kubernetes.io/hostname": wishes.node}
    return job


def _job(wishes: ManifestWishes, name: str, command: list[str]) -> dict[str, Any]:
    container: dict[str, Any] = {
        "name": "bench",
        "image": wishes.image,
        "imagePullPolicy": "IfNotPresent",
        "command": command,
        "volumeMounts": [{"name": "results", "mountPath": "/results"}],
    }
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {"name": name, "namespace": wishes.namespace},
        "spec": {
            "backoffLimit": 0,
            "template": {
                "metadata": {"labels": {"app": "homenode-bench"}},
                "spec": {
                    "restartPolicy": "Never",
                    "containers": [container],
                    "volumes": [
                        {
                            "name": "results",
                            "persistentVolumeClaim": {"claimName": "homenode-results"},
                        }
                    ],
                },
            },
        },
    }


def _containerfile(wishes: ManifestWishes) -> str:
    return f"""\
# The sidecar: KubeVirt's shim, and homenode's hook as the onDefineDomain that the shim looks for.
# Build beside a wheel (pip wheel --no-deps . -w . in homenode's source):
#   podman build -t {wishes.image} -f Containerfile .
ARG KUBEVIRT={wishes.kubevirt}
FROM quay.io/kubevirt/sidecar-shim:${{KUBEVIRT}} AS shim

FROM docker.io/library/python:3.12-slim
# Images that were not built with Bazel have it as /usr/bin/sidecar-shim.
ARG SHIM=/sidecar-shim
COPY --from=shim ${{SHIM}} /sidecar-shim
COPY homenode-*.whl /tmp/
RUN pip install --no-cache-dir /tmp/homenode-*.whl && rm /tmp/homenode-*.whl \\
 && apt-get update && apt-get install -y --no-install-recommends openssh-client \\
 && rm -rf /var/lib/apt/lists/* && useradd -u {USER} -m homenode
USER {USER}
ENTRYPOINT ["/sidecar-shim"]
"""
