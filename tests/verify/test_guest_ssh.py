"""A guest looked at over a real ssh: this very machine stands for it."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from homenode.errors import HostError, UsageError
from homenode.vm.sources import load_host
from tests.command_line import Result, homenode
from tests.ssh_daemon import ssh_daemon

pytestmark = pytest.mark.root

DOCUMENT = """<domain type='kvm'>
  <name>vm</name>
  <memory unit='b'>{memory}</memory>
  <vcpu>{vcpus}</vcpu>
  <os><type arch='x86_64' machine='q35'>hvm</type></os>
</domain>
"""


@pytest.fixture
def port(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    with ssh_daemon(tmp_path, monkeypatch) as number:
        yield number


def verified(tmp_path: Path, source: str, *, more_vcpus: int = 0) -> Result:
    """Holds the guest against a flat document of this machine's size."""
    here = load_host(None)
    if len(here.nodes) != 1:
        pytest.skip(f"needs a machine of one node to stand for a flat guest, found {here.nodes}")
    vcpus = sum(pu.online for pu in here.pus) + more_vcpus
    path = tmp_path / "vm.xml"
    path.write_text(DOCUMENT.format(memory=here.nodes[0].memory_bytes, vcpus=vcpus))
    words = ["verify", str(path), "--host", "h200-xeon8558", "--guest", source]
    return homenode(*words)


@pytest.mark.parametrize("form", ["ssh://root@127.0.0.1:{}", "ssh:ssh://root@127.0.0.1:{}"])
def test_a_guest_is_read_over_ssh_as_it_is(port: int, tmp_path: Path, form: str) -> None:
    done = verified(tmp_path, form.format(port))
    assert done.exit_code == 0, done.output
    assert "by its guest's own view" in done.output and "NUMA nodes" in done.output


def test_a_guest_over_ssh_that_is_not_as_planned_is_reported(port: int, tmp_path: Path) -> None:
    done = verified(tmp_path, f"ssh://root@127.0.0.1:{port}", more_vcpus=1)
    assert done.exit_code == 1
    assert "guest-vcpus" in done.output


def test_a_guest_that_cannot_be_reached_says_what_to_try(port: int, tmp_path: Path) -> None:
    done = verified(tmp_path, "ssh://root@127.0.0.1:1")
    assert isinstance(done.exception, HostError) and "ssh" in (done.exception.hint or "")
    done = verified(tmp_path, "ssh:-oProxyCommand=true")
    assert isinstance(done.exception, UsageError)
