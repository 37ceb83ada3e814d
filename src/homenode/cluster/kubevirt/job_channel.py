"""JobChannel: a Kubernetes job as a place of `bench`, by kubectl. [I/O]

The job runs nothing by itself, and holds the node's CPUs and GPUs; journal, outputs and results
are ours. It is named after the run: who continues a run that was killed finds it, or makes it
again on the same node.
Source: kubectl(1) create, get, exec, delete; batch/v1 (Job), v1 (Pod).
"""

import hashlib
import json
import os
import re
import time
from typing import Self

from msgspec import Struct

from homenode.cluster.kubevirt.manifest_options import ManifestOptions
from homenode.cluster.kubevirt.manifests import shell_job
from homenode.errors import ToolError, UsageError
from homenode.json_text import NotJsonError, decode_json
from homenode.measure.access.machine import Said
from homenode.process import Completed, ToolTimeoutError, run

START_S = 600.0
"""How long a pod may take to run: its image is fetched, and the node may have no free GPU."""

_FORM = "kubernetes://[NAMESPACE/]NODE[?gpus=N&image=IMAGE]"
_NAME = r"[a-z0-9](?:[a-z0-9.-]{0,251}[a-z0-9])?"
_URL = re.compile(
    rf"kubernetes://(?:({_NAME})/)?({_NAME})"
    r"(?:\?(?:gpus=(\d{1,3}))?&?(?:image=([\w./:@-]{1,400}))?)?",
    re.ASCII,
)
_ASK_S = 60.0
_POLL_S = 1.0
_CONTAINER = "bench"


class _Condition(Struct, frozen=True):
    type: str
    status: str
    message: str = ""


class _Waiting(Struct, frozen=True):
    reason: str = ""
    message: str = ""


class _State(Struct, frozen=True):
    waiting: _Waiting | None = None


class _Container(Struct, frozen=True):
    ready: bool = False
    state: _State = _State()


class _Status(Struct, frozen=True, rename="camel"):
    phase: str = ""
    conditions: tuple[_Condition, ...] = ()
    container_statuses: tuple[_Container, ...] = ()

    @property
    def is_ready(self) -> bool:
        return self.phase == "Running" and any(one.ready for one in self.container_statuses)

    @property
    def has_ended(self) -> bool:
        return self.phase in ("Succeeded", "Failed")

    @property
    def why(self) -> str:
        """Why it does not run yet, in Kubernetes' words."""
        waiting = [one.state.waiting for one in self.container_statuses if one.state.waiting]
        said = [f"{one.reason} {one.message}".strip() for one in waiting]
        said += [one.message for one in self.conditions if one.status == "False" and one.message]
        return said[0][:200] if said else self.phase or "no pod"


class _Metadata(Struct, frozen=True, rename="camel"):
    name: str
    deletion_timestamp: str | None = None


class _Pod(Struct, frozen=True):
    metadata: _Metadata
    status: _Status = _Status()


class _Pods(Struct, frozen=True):
    items: tuple[_Pod, ...] = ()


class JobChannel:
    """See HostChannel. options: namespace, node, GPUs and image of the job. run: identifies the
    run among all: its job is found again by it."""

    __slots__ = ("_is_ours", "_kept_open", "_pod", "job", "options")

    def __init__(self, options: ManifestOptions, run: str) -> None:
        digest = hashlib.sha256(f"{options.node}\0{run}".encode()).hexdigest()[:12]
        self.job = f"homenode-bench-{digest}"
        self.options = options
        self._pod: str | None = None
        self._is_ours = False
        self._kept_open: tuple[int, ...] = ()

    @classmethod
    def of(cls, url: str, run: str) -> Self:
        """What --on says. Raises UsageError for what is not of its form."""
        found = _URL.fullmatch(url)
        if found is None:
            raise UsageError(f"--on: expected {_FORM}, found {url[:80]!r}")
        options = ManifestOptions(
            namespace=found[1] or "default",
            node=found[2],
            gpus=int(found[3] or 0),
            bench_image=found[4] or ManifestOptions().bench_image,
        )
        return cls(options, run)

    @property
    def name(self) -> str:
        return f"node {self.options.node} in job {self.job}"

    @property
    def most_input_bytes(self) -> int | None:
        return None

    def holding(self, descriptor: int) -> Self:
        self._kept_open += (descriptor,)
        self._is_ours = True
        return self

    def execute(self, script: str, timeout_s: float, input: str | None = None) -> Said:
        if self._pod is None:
            self._pod = self._running_pod()
        stdin = () if input is None else ("-i",)
        words = ("exec", *stdin, self._pod, "-c", _CONTAINER, "--", "sh", "-c", script)
        done = self._kubectl(words, timeout_s + _ASK_S, input)
        if done.returncode:
            self._pod = None  # evicted, or at its deadline: the next look says
            raise ToolError(f"{self.name}: {_said(done)}")
        return Said(done.stdout, done.stderr)

    def close(self) -> None:
        """Remove the job, unless another homenode made it. Raises ToolError."""
        if self._is_ours:
            self._delete("--wait=false")
        self._pod = None

    def _running_pod(self) -> str:
        """The job's pod, as soon as it runs: the one that is there, else a new one."""
        deadline = time.monotonic() + START_S
        while True:
            self._create()
            asked = self._kubectl(("get", "pods", "-l", f"job-name={self.job}", "-o", "json"))
            try:
                pods = decode_json(asked.stdout_or_raise(), _Pods).items
            except NotJsonError as error:
                raise ToolError(f"kubectl get pods: expected JSON, found: {error}") from None
            left = [pod for pod in pods if pod.metadata.deletion_timestamp is None]
            ready = next((pod for pod in left if pod.status.is_ready), None)
            if ready is not None:
                return ready.metadata.name
            if left and all(pod.status.has_ended for pod in left):
                self._delete("--wait=true")
            if time.monotonic() > deadline:
                why = left[0].status.why if left else "no pod"
                raise ToolTimeoutError(
                    f"{self.name}: expected its pod to run within {START_S:g} s, found: {why}",
                    hint="does the node have free GPUs, and can it fetch the image? "
                    "?gpus=N&image=IMAGE behind the node's name say which",
                )
            time.sleep(_POLL_S)

    def _create(self) -> None:
        """Unless it is there. Raises ToolError."""
        manifest = json.dumps(shell_job(self.options, self.job))
        done = self._kubectl(("create", "-f", "-"), input=manifest)
        if done.returncode == 0:
            self._is_ours = True
        elif "AlreadyExists" not in done.stderr:
            raise ToolError(f"{self.name}: {_said(done)}")

    def _delete(self, wait: str) -> None:
        done = self._kubectl(("delete", "job", self.job, "--ignore-not-found", wait))
        if done.returncode:
            raise ToolError(f"{self.name}: {_said(done)}")

    def _kubectl(
        self, words: tuple[str, ...], timeout_s: float = _ASK_S, input: str | None = None
    ) -> Completed:
        environment = {name: os.environ[name] for name in ("KUBECONFIG",) if name in os.environ}
        return run(
            ("kubectl", "-n", self.options.namespace, *words),
            timeout_s,
            input,
            environment=environment,
            kept_open=self._kept_open,
        )


def _said(done: Completed) -> str:
    lines = [line.strip() for line in done.stderr.splitlines() if line.strip()]
    return lines[-1][:200] if lines else str(done.failure())
