"""Pods are admitted, refused and given CPUs as the kubelet's own managers do it."""

import json
import subprocess
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from homenode.cluster.kubevirt.manifest_options import ClaimScope, ManifestOptions
from homenode.cluster.kubevirt.manifests import claim_template, guest_job, node_job, shell_job
from tests.kubelet.cases import our_answers
from tests.kubelet.oracle import COUNT, RECORDED, SEED, build, random_cases

REASONS = {"", "TopologyAffinityError", "SMTAlignmentError", "UnexpectedAdmissionError"}


def test_every_answer_is_the_one_that_the_kubelets_managers_gave() -> None:
    """The answers were recorded from Kubernetes 1.36.3: tests/kubelet/oracle.py."""
    recorded = [json.loads(line) for line in RECORDED.read_text().splitlines()]
    cases = random_cases(SEED, COUNT)
    assert len(recorded) == COUNT
    for case, answers in zip(cases, recorded, strict=True):
        assert our_answers(case) == answers, json.dumps(case)
    reasons = Counter(pod[0] for answers in recorded for pod in answers)
    assert set(reasons) == REASONS
    assert min(reasons.values()) > 10, reasons


@pytest.mark.lab
def test_claim_templates_are_what_the_api_server_takes(tmp_path: Path) -> None:
    program = build(tmp_path, "./claims")

    def refused(template: dict[str, Any]) -> str:
        text = json.dumps(template)
        return subprocess.run([program], input=text, capture_output=True, text=True).stdout

    for scope in ClaimScope:
        for gpus, nic_class in ((1, None), (8, "nic.example"), (16, "nic.example"), (32, None)):
            options = ManifestOptions(claims=scope, gpus=gpus, nic_class=nic_class)
            assert not refused(claim_template(options))
            wrong = claim_template(options)
            wrong["spec"]["spec"]["devices"]["requests"][0]["exactly"]["cuont"] = 1
            assert "cuont" in refused(wrong)


@pytest.mark.lab
def test_measuring_jobs_are_what_restricted_namespaces_admit(tmp_path: Path) -> None:
    program = build(tmp_path, "./podsecurity")

    def refused(job: dict[str, Any]) -> str:
        text = json.dumps(job)
        return subprocess.run([program], input=text, capture_output=True, text=True).stdout

    of_node = ManifestOptions(node="node-7")
    for job in (guest_job(ManifestOptions()), node_job(of_node), shell_job(of_node, "bench")):
        assert refused(job) == ""
        pod = job["spec"]["template"]["spec"]
        for context in (pod["securityContext"], pod["containers"][0]["securityContext"]):
            for name in context.keys() - {"runAsUser", "fsGroup"}:
                value = context.pop(name)
                assert refused(job), name
                context[name] = value
        pod["securityContext"]["runAsUser"] = 0
        assert "runAsUser=0" in refused(job)
