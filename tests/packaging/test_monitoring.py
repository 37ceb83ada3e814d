"""What is shipped for monitoring names metrics that exist, and Prometheus' own tool takes it."""

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from homenode.check.doctor.diagnosis import diagnose
from homenode.show.findings_text import format_prometheus
from tests.doctor_domains import host

MONITORING = Path(__file__).parents[2] / "packaging/monitoring"
RULES = MONITORING / "homenode-rules.yml"
SICK = "rtx5090-epyc7702"


def text() -> str:
    return format_prometheus(diagnose(host(SICK)), {"host": SICK})


def test_rules_and_dashboard_use_metrics_that_are_written() -> None:
    written = set(re.findall(r"^(homenode_\w+)", text(), re.M))
    dashboard = json.loads((MONITORING / "homenode-dashboard.json").read_text())
    expressions = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    used = set(re.findall(r"\bhomenode_\w+", " ".join(expressions) + RULES.read_text()))
    assert used == written == {"homenode_finding", "homenode_findings", "homenode_not_read"}


@pytest.mark.skipif(shutil.which("promtool") is None, reason="needs promtool")
def test_promtool_accepts_the_metrics_and_the_rules() -> None:
    argv = ["promtool", "check", "metrics"]
    checked = subprocess.run(argv, input=text(), capture_output=True, text=True)
    assert (checked.returncode, checked.stderr) == (0, "")
    subprocess.run(["promtool", "check", "rules", str(RULES)], check=True, capture_output=True)
