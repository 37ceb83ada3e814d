"""Measuring jobs: Kubernetes jobs that run `homenode bench` and collect its runs on one volume.

Source: batch/v1 (Job), v1 (PersistentVolumeClaim).
"""

from typing import Any

from homenode.cluster.kubevirt.manifest_options import ManifestOptions
from homenode.ssh_options import CLOSED

USER = 1001
"""Of the image: not root, and with a name, which ssh asks for."""

LONGEST_S = 6 * 3600
"""A guest that never ends ends here."""

_NAME = 'name="$NAME-$(date -u +%Y%m%dT%H%M%SZ)"\ncode=0\n'
_VERDICT = '# 1: measured, with findings. They are in the run.\n[ "$code" -le 1 ] || exit "$code"\n'

_REACH = f"""\
reach() {{
  ssh {" ".join(CLOSED)} -i /ssh/key -o BatchMode=yes \\
    -o GlobalKnownHostsFile=/dev/null -o UserKnownHostsFile="$2" -o HostKeyAlias="$alias" \\
    -o StrictHostKeyChecking="$1" -o HashKnownHosts=no -o UpdateHostKeys=no \\
    -- "$GUEST" "$3"
}}
run() {{ reach yes "$keys" "$1"; }}
keys=/ssh/known_hosts
alias=${{GUEST#*@}}
if [ ! -s "$keys" ]; then
  keys=/results/.known_hosts-$NAME
  alias=$NAME
  if [ ! -s "$keys" ]; then
    first=$(mktemp "$keys.XXXXXX")
    reach accept-new "$first" true || {{ code=$?; rm -f "$first"; exit "$code"; }}
    ln "$first" "$keys" 2>/dev/null || [ -s "$keys" ] || cp "$first" "$keys"
    rm -f "$first"
  fi
fi
run true || {{
  echo "$GUEST: expected a login, and the host key of $keys" >&2
  echo "  hint: if the guest was installed anew, take its old key out of that file" >&2
  exit 3
}}
"""
"""A known_hosts in the secret says whose key it must be. Else the first job's login takes the
guest's, and keeps it on the volume under the VM's name: its address changes with each of its pods.
"""

GUEST_SCRIPT = (
    "set -eu\n"
    + _REACH
    + _NAME
    + "run \"homenode bench '$name' --results homenode-results\" || code=$?\n"
    + "run \"cd homenode-results && tar -cf - */'$name'\" | \\\n"
    + '  homenode kubevirt receive "$name" --results /results\n'
    + _VERDICT
)
NODE_SCRIPT = (
    "set -eu\n" + _NAME + 'homenode bench "$name" --results /results || code=$?\n' + _VERDICT
)
"""Each run has a name of its own, so that a job that is applied again adds one."""


def results_claim(options: ManifestOptions) -> dict[str, Any]:
    """Where the jobs of all VMs and nodes leave their results."""
    return {
        "apiVersion": "v1",
        "kind": "PersistentVolumeClaim",
        "metadata": {"name": "homenode-results", "namespace": options.namespace},
        "spec": {
            "accessModes": ["ReadWriteMany"],
            "resources": {"requests": {"storage": "1Gi"}},
        },
    }


def guest_job(options: ManifestOptions) -> dict[str, Any]:
    """Runs the suite in the guest over ssh, and fetches what it wrote."""
    job = _job(options, f"homenode-bench-{options.vm}", ["sh", "-c", GUEST_SCRIPT])
    pod = job["spec"]["template"]["spec"]
    container = pod["containers"][0]
    container["env"] = [
        {"name": "GUEST", "value": options.guest},
        {"name": "NAME", "value": options.vm},
    ]
    container["volumeMounts"].append({"name": "ssh", "mountPath": "/ssh", "readOnly": True})
    pod["volumes"].append(
        {"name": "ssh", "secret": {"secretName": "homenode-ssh", "defaultMode": 0o440}}
    )
    return job


def node_job(options: ManifestOptions) -> dict[str, Any]:
    """Runs the suite on a node itself, with all of its GPUs: what the VM is compared with."""
    job = _job(options, "homenode-bench-node", ["sh", "-c", NODE_SCRIPT])
    pod = job["spec"]["template"]["spec"]
    container = pod["containers"][0]
    container["env"] = [{"name": "NAME", "valueFrom": {"fieldRef": {"fieldPath": "spec.nodeName"}}}]
    container["resources"] = {"limits": {"nvidia.com/gpu": str(options.gpus)}}
    if options.node is not None:
        pod["nodeSelector"] = {"kubernetes.io/hostname": options.node}
    return job


def shell_job(options: ManifestOptions, name: str) -> dict[str, Any]:
    """Holds a node's CPUs and GPUs for `homenode bench --on kubernetes://`, which runs its tests
    there one by one. Nothing is stored there."""
    job = _job(options, name, ["sleep", str(LONGEST_S)])
    pod = job["spec"]["template"]["spec"]
    del pod["volumes"], pod["containers"][0]["volumeMounts"]
    pod["terminationGracePeriodSeconds"] = 1  # sleep does not heed the signal that asks it to end
    if options.gpus:
        pod["containers"][0]["resources"] = {"limits": {"nvidia.com/gpu": str(options.gpus)}}
    pod["nodeSelector"] = {"kubernetes.io/hostname": options.node}
    return job


def _job(options: ManifestOptions, name: str, command: list[str]) -> dict[str, Any]:
    container: dict[str, Any] = {
        "name": "bench",
        "image": options.bench_image,
        "imagePullPolicy": "IfNotPresent",
        "command": command,
        "volumeMounts": [{"name": "results", "mountPath": "/results"}],
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "capabilities": {"drop": ["ALL"]},
        },
    }
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {"name": name, "namespace": options.namespace},
        "spec": {
            "backoffLimit": 0,
            "activeDeadlineSeconds": LONGEST_S,
            "template": {
                "metadata": {"labels": {"app": "homenode-bench"}},
                "spec": {
                    "restartPolicy": "Never",
                    "automountServiceAccountToken": False,
                    # The volume is written, and root's ssh key read, through the group: then ssh
                    # does not mind the key's mode. With the container's, it is what Kubernetes'
                    # profile "restricted" asks for.
                    "securityContext": {
                        "runAsUser": USER,
                        "runAsNonRoot": True,
                        "fsGroup": USER,
                        "seccompProfile": {"type": "RuntimeDefault"},
                    },
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
