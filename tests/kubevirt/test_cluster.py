"""A real kube-apiserver with KubeVirt's CRDs takes each kubectl line that is printed."""

import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from homenode.cluster.kubevirt.vmi import HOOK_ANNOTATION
from tests.command_line import homenode
from tests.kubevirt.kubevirt_code import build
from tests.slurm.testbed import free_ports, until

pytestmark = pytest.mark.lab

CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
KUBE = Path(os.environ.get("HOMENODE_KUBE") or CACHE / "homenode/kube")
GPU = ("--gpu", "nvidia.com/GH100_H100", "--gpu-id", "10de:2330", "--gpus", "2")
DEVICE = {
    "pciVendorSelector": "10DE:2330",
    "resourceName": "nvidia.com/GH100_H100",
    "externalResourceProvider": False,
}
EXTERNAL = DEVICE | {"externalResourceProvider": True}
OTHER = DEVICE | {"pciVendorSelector": "10de:1db6", "resourceName": "nvidia.com/V100"}
GATES = ["Sidecar", "CPUManager"]
CONFIGURATIONS: dict[str, dict[str, Any]] = {
    "fresh": {},
    # KubeVirt's operator drops the empty list of its own manifest.
    "of the operator": {"developerConfiguration": {}},
    "empty": {"developerConfiguration": {"featureGates": []}},
    "used": {
        "developerConfiguration": {"featureGates": ["Root", "Sidecar"]},
        "permittedHostDevices": {"pciHostDevices": [OTHER], "mediatedDevices": []},
    },
    "external": {"permittedHostDevices": {"pciHostDevices": [EXTERNAL, OTHER]}},
}
"""Configurations of a KubeVirt CR: its gates and devices stay."""


def kubevirt_cr(configuration: dict[str, Any]) -> str:
    cr = {
        "apiVersion": "kubevirt.io/v1",
        "kind": "KubeVirt",
        "metadata": {"name": "kubevirt", "namespace": "kubevirt"},
        "spec": {"configuration": configuration} if configuration else {},
    }
    return json.dumps(cr)


class Cluster:
    """A kube-apiserver, an etcd, and kubectl for it."""

    def __init__(self, base: Path) -> None:
        self.base = base
        self._processes: list[subprocess.Popen[bytes]] = []
        path = f"{KUBE}:{base}:{os.environ['PATH']}"
        self.environment = os.environ | {"PATH": path, "KUBECONFIG": f"{base}/kubeconfig"}

    def sh(self, line: str, code: int | None = 0, text: str = "") -> str:
        """What a line of a shell prints."""
        argv = ["bash", "-o", "pipefail", "-c", line]
        done = subprocess.run(
            argv, env=self.environment, input=text, capture_output=True, text=True, timeout=300
        )
        output = done.stdout + done.stderr
        assert code in (None, done.returncode), f"{line}\n{output}"
        return done.stdout if code == 0 else output

    def get(self, kind: str, name: str, namespace: str) -> dict[str, Any]:
        printed = self.sh(f"kubectl get {kind} {name} -n {namespace} -o json")
        return dict(json.loads(printed))

    def start(self) -> None:
        base = self.base
        client, peer, secure = free_ports(3)
        self.sh(f"openssl genrsa -out {base}/key.pem 2048")
        (base / "tokens").write_text("token,admin,1,system:masters\n")
        self.sh(
            f"kubectl config set-cluster lab --server=https://127.0.0.1:{secure} "
            "--insecure-skip-tls-verify && kubectl config set-credentials lab --token=token && "
            "kubectl config set-context lab --cluster=lab --user=lab && "
            "kubectl config use-context lab"
        )
        etcd = f"http://127.0.0.1:{client}"
        self._daemon(
            *("etcd", f"--data-dir={base}/etcd", f"--listen-client-urls={etcd}"),
            *(f"--advertise-client-urls={etcd}", f"--listen-peer-urls=http://127.0.0.1:{peer}"),
        )
        self._daemon(
            *(f"{KUBE}/kube-apiserver", f"--etcd-servers={etcd}", f"--cert-dir={base}/certs"),
            *("--bind-address=127.0.0.1", f"--secure-port={secure}"),
            *(f"--token-auth-file={base}/tokens", "--authorization-mode=RBAC"),
            *("--service-account-issuer=https://lab", "--service-cluster-ip-range=10.0.0.0/24"),
            *(f"--service-account-key-file={base}/key.pem",),
            *(f"--service-account-signing-key-file={base}/key.pem",),
        )
        until(lambda: "ok" in self.sh("kubectl get --raw /readyz", None), "kube-apiserver")
        self.sh("virtctl crds | kubectl create -f -")
        kinds = "kubectl get vm,vmi,kubevirt -A"
        until(lambda: "No resources found" in self.sh(kinds, None), "KubeVirt's kinds")
        self.sh("kubectl create namespace kubevirt && kubectl create namespace gpu")
        self.sh("kubectl create -f -", text=kubevirt_cr({}))

    def stop(self) -> None:
        for process in reversed(self._processes):
            process.terminate()
            process.wait(60)

    def _daemon(self, *argv: str) -> None:
        with (self.base / f"{Path(argv[0]).name}.log").open("wb") as log:
            self._processes.append(subprocess.Popen(argv, stdout=log, stderr=log))


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    if not (KUBE / "kube-apiserver").exists() or shutil.which("etcd") is None:
        pytest.skip(f"no kube-apiserver in {KUBE} (tests/lab/build-kube), or no etcd-server")
    base = tmp_path_factory.mktemp("cluster")
    build(base, virtctl="./virtctl")
    started = Cluster(base)
    try:
        started.start()
        yield started
    finally:
        started.stop()


def printed_lines(directory: Path, *options: str) -> list[str]:
    """The commands of the steps that manifest prints."""
    done = homenode("kubevirt", "manifest", "-o", directory, *GPU, *options)
    assert done.exit_code == 0, done.output
    steps = [line[8:] for line in done.stderr.splitlines() if not line.startswith("wrote ")]
    return [step for step in steps if step.startswith(("kubectl ", "virtctl "))]


@pytest.mark.parametrize("case", CONFIGURATIONS)
@pytest.mark.parametrize("version", ["v1.6.0", "v1.8.4"])
def test_each_line_works_twice(cluster: Cluster, tmp_path: Path, case: str, version: str) -> None:
    configuration = CONFIGURATIONS[case]
    gates = configuration.get("developerConfiguration", {}).get("featureGates", [])
    devices = configuration.get("permittedHostDevices", {}).get("pciHostDevices", [])
    cr = kubevirt_cr(configuration)
    cluster.sh("kubectl delete kubevirt,vm --all -A && kubectl create -f -", text=cr)
    lines = printed_lines(tmp_path / "sidecar", "--namespace", "gpu", "--kubevirt", version)
    assert sum("kubectl patch" in line for line in lines) == (4 if version == "v1.8.4" else 3)
    lines += [
        f"kubectl apply -f {tmp_path}/sidecar/bench-guest.yaml",
        "kubectl delete job --all -n gpu",
    ]
    answers = []
    for _ in range(2):
        for line in lines:
            if line.startswith("virtctl "):
                # No virt-api is here: its address is not found.
                assert "(put virtualmachines.kubevirt.io gpu-vm)" in cluster.sh(line, 1)
            else:
                cluster.sh(line)
        answers.append(cluster.get("kubevirt", "kubevirt", "kubevirt")["spec"]["configuration"])
    patched, again = answers
    assert again == patched
    native = ["PCINUMAAwareTopology"] if version == "v1.8.4" else []
    named = patched["developerConfiguration"]["featureGates"]
    assert sorted(named) == sorted({*gates, *native, *GATES})
    others = [device for device in devices if device != EXTERNAL]
    permitted = patched["permittedHostDevices"]["pciHostDevices"]
    assert permitted == [*others, EXTERNAL if EXTERNAL in devices else DEVICE]


@pytest.mark.parametrize("image", [(), ("--image", "registry.example/sidecar:1")])
def test_an_existing_vm_gets_hook(cluster: Cluster, tmp_path: Path, image: tuple[str, ...]) -> None:
    lines = printed_lines(tmp_path / "sidecar", "--vm", "old", *image)
    manifest = (tmp_path / "sidecar/vm.yaml").read_text().replace("homenode/on-error", "x/mine")
    cluster.sh("kubectl delete vm --all -A && kubectl create -f -", text=manifest)
    (patch,) = [line for line in lines if "vm-hook" in line]
    cluster.sh(patch)
    vm = cluster.get("vm", "old", "default")
    annotations = vm["spec"]["template"]["metadata"]["annotations"]
    (sidecar,) = json.loads(annotations[HOOK_ANNOTATION])
    assert ("image" in sidecar) == bool(image)
    assert annotations["homenode/on-error"] == annotations["x/mine"] == "fail"
    if not image:
        (apply,) = [line for line in lines if "hook-configmap" in line]
        cluster.sh(apply)
        configmap = cluster.get("configmap", sidecar["configMap"]["name"], "default")
        assert "def main" in configmap["data"][sidecar["configMap"]["key"]]
    # What the API server prints of it is what the check reads, in every form.
    answers = set()
    for form in ("json", "yaml"):
        for kind in ("vm old", "vm", "vm -A"):
            path = tmp_path / "vm.txt"
            path.write_text(cluster.sh(f"kubectl get {kind} -o {form}"))
            cr = tmp_path / "cr.txt"
            cr.write_text(cluster.sh(f"kubectl get kubevirt -A -o {form}"))
            done = homenode("kubevirt", "check", path, "--kubevirt", cr, "--json")
            answers.add((done.exit_code, done.stdout))
    assert len(answers) == 1 and all(code in (0, 1) for code, _ in answers)
