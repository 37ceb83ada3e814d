"""Manifests: what a cluster needs so that its VMs get the hook, and jobs that measure them.

Source: kubevirt.io/v1 (VirtualMachine, KubeVirt), hco.kubevirt.io/v1beta1 (HyperConverged);
KubeVirt cmd/sidecars for the shim.
"""

import json
import re
from typing import Any

from homenode.errors import UsageError
from homenode.kubevirt.demand import EVEN_ANNOTATION, HOOK_ANNOTATION
from homenode.kubevirt.manifest_wishes import ManifestWishes
from homenode.kubevirt.measuring_jobs import USER, guest_job, node_job, results_claim
from homenode.kubevirt.yaml_text import yaml_text

GATES = ("Sidecar", "CPUManager")
_GATES_PATH = "/spec/configuration/developerConfiguration/featureGates"
_LARGEST = 1 << 20
_GPUS_OF_NODE = 4

_LABEL = r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?"
_SPELLINGS = {
    "--vm": (_LABEL, "a name of lower-case letters, digits and '-'"),
    "--namespace": (_LABEL, "a name of lower-case letters, digits and '-'"),
    "--image": (r"[A-Za-z0-9][A-Za-z0-9._:/@-]{0,254}", "an image such as registry.example/h:1"),
    "--gpu": (r"[A-Za-z0-9][A-Za-z0-9._/-]{0,316}", "a resource such as nvidia.com/GA100"),
    "--kubevirt": (r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}", "a version such as v1.6.0"),
    "--guest": (r"[A-Za-z0-9_][A-Za-z0-9._-]*@[A-Za-z0-9][A-Za-z0-9.:-]{0,252}", "user@host"),
    "--node": (rf"{_LABEL}(\.{_LABEL})*", "a node's name"),
}
"""Options end up in shell scripts and a Containerfile, where another text could be more."""


def manifests(wishes: ManifestWishes) -> dict[str, str]:
    """File name -> content. Raises UsageError for wishes that no cluster takes."""
    _check_spellings(wishes)
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


def _check_spellings(wishes: ManifestWishes) -> None:
    for option, (pattern, expected) in _SPELLINGS.items():
        text = getattr(wishes, option[2:])
        if text is not None and re.fullmatch(pattern, text, re.ASCII) is None:
            raise UsageError(f"{option}: expected {expected}, found {text[:60]!r}")


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
    """A VM whose guest has the nodes' cells, and the hook.

    More GPUs than a node of a common board has come from both packages, so the guest has two
    sockets. maxSockets: KubeVirt keeps room for four times as many vCPUs otherwise.
    """
    sockets = 2 if wishes.gpus > _GPUS_OF_NODE and wishes.vcpus % 2 == 0 else 1
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
                        HOOK_ANNOTATION: hook_annotation(wishes),
                        "homenode/on-error": "fail",
                        EVEN_ANNOTATION: "",
                    },
                },
                "spec": {
                    "domain": {
                        "machine": {"type": "q35"},
                        "cpu": {
                            "cores": wishes.vcpus // sockets,
                            "sockets": sockets,
                            "maxSockets": sockets,
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


def _containerfile(wishes: ManifestWishes) -> str:
    return f"""\
# The sidecar: KubeVirt's shim, and homenode's hook as the onDefineDomain that the shim looks for.
# Build beside a wheel (pip wheel --no-deps . -w . in homenode's source) and requirements.lock:
#   podman build -t {wishes.image} -f Containerfile .
# Tags move: to build the same again, give digests with the tags beside them
# (skopeo inspect prints them):
#   --build-arg KUBEVIRT={wishes.kubevirt}@sha256:DIGEST
#   --build-arg BASE=docker.io/library/python:3.12-slim@sha256:DIGEST
ARG KUBEVIRT={wishes.kubevirt}
ARG BASE=docker.io/library/python:3.12-slim
FROM quay.io/kubevirt/sidecar-shim:${{KUBEVIRT}} AS shim

FROM ${{BASE}}
# Images that were not built with Bazel have it as /usr/bin/sidecar-shim.
ARG SHIM=/sidecar-shim
COPY --from=shim ${{SHIM}} /sidecar-shim
COPY homenode-*.whl requirements.lock /tmp/
RUN pip install --no-cache-dir --require-hashes -r /tmp/requirements.lock \\
 && pip install --no-cache-dir --no-deps --no-index /tmp/homenode-*.whl \\
 && rm /tmp/homenode-*.whl /tmp/requirements.lock \\
 && apt-get update \\
 && apt-get install -y --no-install-recommends openssh-client numactl pciutils \\
 && rm -rf /var/lib/apt/lists/* && useradd -u {USER} -m homenode
USER {USER}
ENTRYPOINT ["/sidecar-shim"]
"""
