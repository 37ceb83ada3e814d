"""What is shipped for monitoring: read by Prometheus' own tools, and naming metrics that exist."""

import json
import os
import re
import shutil
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from homenode.check.metrics import metrics
from tests.watch.test_watch import HGX, PAGES, certified, link_files, seen, snapshot, tuned

ROOT = Path(__file__).parents[2]
MONITORING = ROOT / "packaging/monitoring"
needs_promtool = pytest.mark.skipif(
    shutil.which("promtool") is None, reason="needs promtool: apt install prometheus"
)


def text() -> str:
    files = link_files("0000:19:00.0", "8.0 GT/s")
    found = seen(snapshot(PAGES, files, tuned(HGX)), certified(PAGES))
    return metrics(found.state, found.host, found.cpu_s)


def test_rules_and_dashboard_use_metrics_and_labels_that_are_written() -> None:
    written = set(re.findall(r"^(homenode_\w+)", text(), re.M))
    dashboard = json.loads((MONITORING / "homenode-dashboard.json").read_text())
    asked = (
        " ".join(target["expr"] for panel in dashboard["panels"] for target in panel["targets"])
        + (MONITORING / "homenode-rules.yml").read_text()
    )
    assert set(re.findall(r"\bhomenode_\w+", asked)) <= written
    assert len({panel["id"] for panel in dashboard["panels"]}) == len(dashboard["panels"])


@needs_promtool
def test_promtool_accepts_the_metrics_and_the_rules_fire_as_they_should() -> None:
    checked = subprocess.run(
        ["promtool", "check", "metrics"], input=text(), capture_output=True, text=True
    )
    assert (checked.returncode, checked.stderr) == (0, "")
    for argv in (
        ["check", "rules", "homenode-rules.yml"],
        ["test", "rules", "homenode-rules.test.yml"],
    ):
        done = subprocess.run(["promtool", *argv], cwd=MONITORING, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr


@needs_promtool
@pytest.mark.skipif(shutil.which("prometheus-node-exporter") is None, reason="needs node exporter")
def test_the_node_exporter_serves_the_file_and_prometheus_raises_and_clears_the_alert(
    tmp_path: Path,
) -> None:
    (tmp_path / "homenode.prom").write_text(text())
    rules = MONITORING / "homenode-rules.yml"
    with _exporter(tmp_path) as exporter:
        configuration = tmp_path / "prometheus.yml"
        configuration.write_text(
            "global: {scrape_interval: 1s, evaluation_interval: 1s}\n"
            f"rule_files: [{json.dumps(str(rules))}]\n"
            "scrape_configs:\n  - job_name: node\n    static_configs:\n"
            f"      - targets: ['127.0.0.1:{exporter}']\n"
        )
        port = _free_port()
        argv = [
            "prometheus",
            f"--config.file={configuration}",
            f"--storage.tsdb.path={tmp_path}/tsdb",
            f"--web.listen-address=127.0.0.1:{port}",
        ]
        with _started(argv):
            served = f"http://127.0.0.1:{port}/api/v1/alerts"
            alerts = _until(served, "HomenodeCritical")
            healthy = seen(snapshot(PAGES), certified(PAGES))
            state = metrics(healthy.state, healthy.host, healthy.cpu_s)
            (tmp_path / "homenode.prom").write_text(state)
            _until(served, "HomenodeCritical", is_there=False)
    (found,) = [
        alert
        for alert in json.loads(alerts)["data"]["alerts"]
        if alert["labels"]["alertname"] == "HomenodeCritical"
    ]
    assert found["labels"]["id"] == "drift-link"


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="needs systemd-analyze")
def test_systemd_accepts_the_units(tmp_path: Path) -> None:
    program = tmp_path / "homenode"
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    units = []
    for unit in sorted((ROOT / "packaging/systemd").glob("homenode-watch.*")):
        made = unit.read_text().replace("/usr/bin/homenode", str(program))
        target = tmp_path / unit.name
        target.write_text(re.sub(r"^Documentation=.*\n", "", made, flags=re.M))
        units.append(str(target))
    done = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", *units],
        capture_output=True,
        text=True,
        env={**os.environ, "SYSTEMD_LOG_LEVEL": "warning"},
    )
    ours = [line for line in done.stderr.splitlines() if "homenode" in line]
    assert ours == []


def _free_port() -> int:
    import socket

    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


@contextmanager
def _started(argv: list[str]) -> Iterator[None]:
    process = subprocess.Popen(argv, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        yield
    finally:
        process.terminate()
        process.wait(30)


@contextmanager
def _exporter(folder: Path) -> Iterator[int]:
    port = _free_port()
    argv = [
        "prometheus-node-exporter",
        "--collector.disable-defaults",
        "--collector.textfile",
        f"--collector.textfile.directory={folder}",
        f"--web.listen-address=127.0.0.1:{port}",
    ]
    with _started(argv):
        _until(f"http://127.0.0.1:{port}/metrics", "homenode_alert{")
        yield port


def _until(url: str, word: str, *, is_there: bool = True) -> str:
    """What is served there once it holds a word, or holds it no more."""
    for _ in range(600):
        try:
            with urllib.request.urlopen(url, timeout=5) as answer:
                found = answer.read().decode()
            if (word in found) is is_there:
                return str(found)
        except OSError:
            pass
        time.sleep(0.1)
    raise AssertionError(f"{url}: {word} did not come")
