"""What guests, tools and files say ends a command with a message at most, in time and in place."""

import ast
import base64
import io
import json
import tarfile
from pathlib import Path
from typing import Any

import pytest

from homenode.change.journal import ChangeHead
from homenode.check.verify.live.capture import _parse_bytes
from homenode.errors import HomenodeError, HostError, InputError, ParseError, ToolError
from homenode.formats import NotJsonError, decode, decode_head, decode_journal, decode_json
from homenode.machine.description.parse import parse_description
from homenode.machine.discover.host import discover
from homenode.machine.tools import lspci, numactl
from homenode.machine.topology import Host
from homenode.measure.imported_runs import count_vcpus
from homenode.measure.results.store import MAX_RECEIVED_BYTES, parse_run, receive_run, run_text
from homenode.measure.tool_setup import DIRECTORY, setup_journal
from homenode.measure.trial.guest import GuestAgent
from homenode.measure.trial.journal import TrialEntry, TrialHead
from homenode.plan.stored import read_plan_for
from homenode.safe.record_directory import JOURNAL
from homenode.vm.hypervisor.connection import parse_dominfo, parse_pin_lines
from homenode.vm.sources import load_host
from tests.command_line import NEEDS_CLUSTER
from tests.report_runs import full_run
from tests.source_trees import FILES, nodes
from tests.sysfs_trees import PCI, cpu_files, pci_function, snapshot

DEEP = "[" * 200_000
HOSTILE = (
    DEEP,
    '{"a":' * 200_000,
    "9" * 100_000,
    '{"format": "homenode.plan/' + "9" * 5000 + '"}',
    '{"format": "homenode.plan/\u00b2"}',
    '{"format": "homenode.host/\u0663"}',
    '"\\ud800"',
    "",
    '{"format": 1e400}',
    "\x00",
    "\udcff",
    "null",
    "[]",
    '{"format": []}',
)


@pytest.mark.parametrize("text", HOSTILE, ids=lambda text: ascii(text[:24]))
def test_hostile_json_is_a_message_wherever_it_is_read(text: str, tmp_path: Path) -> None:
    content = text.encode("utf-8", "surrogateescape")
    (tmp_path / DIRECTORY).mkdir(parents=True)
    (tmp_path / DIRECTORY / JOURNAL).write_bytes((content or b"x") + b"\n")
    (tmp_path / "host").write_bytes(content)
    readers = (
        lambda: decode(content, "host", Host, "x"),
        lambda: parse_run(content + b"\n", "x"),
        lambda: decode_head(content, "change", ChangeHead, "x"),
        lambda: setup_journal(tmp_path).read_entries(),
        lambda: decode_journal(content + b"\n", "trial", TrialHead, TrialEntry, "x"),
        lambda: read_plan_for(load_host("hgx-h100"), content, "x"),
        lambda: load_host(str(tmp_path / "host")),
    )
    for reader in readers:
        with pytest.raises(HomenodeError):
            reader()


LONG = "9" * 5000
"""More digits than int() takes."""
FUNCTION = "3b:00.0 3D controller [0302]: NVIDIA Corporation Device [10de:2330]\n"


def test_a_number_of_thousands_of_digits_is_no_traceback() -> None:
    (function,) = lspci.parse(f"{FUNCTION}\tRegion {LONG}: Memory at 0 (64-bit) [size=16M]\n")
    assert not function.bars
    for text in (LONG, "--5"):
        with pytest.raises(ParseError, match="NUMA node: a number"):
            lspci.parse(f"{FUNCTION}\tNUMA node: {text}\n")
    with pytest.raises(ParseError):
        numactl.parse_hardware(f"available: {LONG} nodes (0-1)\n")
    assert count_vcpus({"cpu_topology.txt": f"CPU(s): {LONG}"}) is None
    files = cpu_files() | pci_function("0000:3b:00.0", "030200", "10de:2330")
    files["/proc/cpuinfo"] = f"vendor_id : GenuineIntel\ncpu family : {LONG}\n"
    files[f"{PCI}/0000:3b:00.0/numa_node"] = LONG
    host = discover(snapshot(files))
    assert host.cpu.family is None
    assert any("a node that is not online" in gap.reason for gap in host.gaps)


UNREADABLE = pytest.mark.parametrize("number", [LONG, "\u00b2"], ids=["long", "superscript"])


@NEEDS_CLUSTER
@UNREADABLE
def test_a_number_of_a_cluster_that_int_refuses_is_none(number: str) -> None:
    from homenode.cluster.arguments import parse_version
    from homenode.cluster.slurm.slurm_nodes import parse_nodes
    from homenode.cluster.slurm.squeue import parse_states

    assert parse_nodes(f"n1|p|idle|{number}|1000|gpu:8\n") == ()
    assert parse_nodes(f"n1|p|idle|64|{number}|gpu:8\n") == ()
    (job,) = parse_states(f"7|{number}|RUNNING@name@None", "@")
    assert job.task is None
    assert parse_states(f"{number}|1|RUNNING@name@None", "@") == ()
    assert parse_version(f"v1.{number}") is None


@UNREADABLE
def test_a_number_that_int_refuses_is_none(number: str) -> None:
    with pytest.raises(ParseError, match="Id: a number or -"):
        parse_dominfo(f"Id: {number}\nName: a\nUUID: b\nState: running\nPersistent: yes\n")
    with pytest.raises(ParseError):
        parse_pin_lines(f"vcpu {number} 0-1")
    assert _parse_bytes(f"Hugepagesize: {number} kB\n", "Hugepagesize") is None


def test_deep_toml_is_a_message() -> None:
    with pytest.raises(InputError):
        parse_description("a = " + DEEP, "host.toml")


def test_json_is_read_with_its_limits_everywhere() -> None:
    """A reader that forgets the recursion limit ends in a traceback."""
    broken = []
    for path in FILES:
        if path.parent.name in ("programs", "files") or path.name == "formats.py":
            continue  # what is sent runs alone, and reads what its sender wrote
        for node in nodes(path):
            if not isinstance(node, ast.Try):
                continue
            reads = any(
                ast.unparse(call.func)
                in ("json.loads", "msgspec.json.decode", "tomllib.loads", "_DECODER.raw_decode")
                for body in node.body
                for call in ast.walk(body)
                if isinstance(call, ast.Call)
            )
            caught = " ".join(ast.unparse(h.type) for h in node.handlers if h.type is not None)
            if reads and "RecursionError" not in caught:
                broken.append(f"{path}:{node.lineno}")
    assert not broken


class _Agent:
    """virsh, of a guest whose agent answers as it likes."""

    def __init__(self, status: Any) -> None:
        self._status = status

    def agent_command(self, uuid: str, command: str, timeout_s: int) -> str:
        if "guest-exec-status" not in command:
            return '{"return": {"pid": 7}}'
        return self._status if isinstance(self._status, str) else json.dumps(self._status)


@pytest.mark.parametrize(
    "status",
    [
        {"return": {"exited": True, "out-data": "\u00fcber"}},
        {"return": {"exited": True, "out-data": "a"}},
        {"return": []},
        DEEP,
        "9" * 10_000,
        "",
    ],
    ids=lambda one: ascii(str(one)[:30]),
)
def test_an_agents_hostile_answer_is_a_message(status: Any) -> None:
    agent = GuestAgent(_Agent(status), "uuid", "vm7")  # type: ignore[arg-type]
    with pytest.raises(ToolError, match="guest agent"):
        agent.execute("true", 5)


def test_an_agents_strange_types_are_no_traceback() -> None:
    strange: tuple[Any, ...] = (7, None, [], {"a": 1}, True)
    for data in strange:
        agent = GuestAgent(
            _Agent({"return": {"exited": True, "out-data": data}}),  # type: ignore[arg-type]
            "uuid",
            "vm7",
        )
        assert agent.execute("true", 5).stdout == ""


def test_json_that_is_sound_is_read() -> None:
    assert decode_json('{"a": [1, "b"]}') == {"a": [1, "b"]}
    assert decode_json("7", int) == 7
    with pytest.raises(NotJsonError):
        decode_json('"7"', int)
    assert base64.b64decode("aQ==") == b"i"


NAME = "gpu-vm-20260101T000000Z"


def sent(*members: tuple[str, bytes | None], name: str = NAME, run: bool = True) -> io.BytesIO:
    """A tar as a guest could send it. None: a link to /etc/passwd."""
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as tar:
        one = run_text(full_run("pin", 1, system="h100", name=name)).encode()
        for path, content in ((f"h100/{NAME}/results.jsonl", one), *members)[0 if run else 1 :]:
            member = tarfile.TarInfo(path)
            if content is None:
                member.type, member.linkname = tarfile.SYMTYPE, "/etc/passwd"
                tar.addfile(member)
            else:
                member.size = len(content)
                tar.addfile(member, io.BytesIO(content))
    packed.seek(0)
    return packed


def test_a_run_that_a_guest_sends_is_kept_whole(tmp_path: Path) -> None:
    directory = receive_run(sent((f"h100/{NAME}/raw/0001-x.txt", b"\xffraw")), tmp_path, NAME)
    assert directory == tmp_path / "h100" / NAME
    assert (directory / "raw" / "0001-x.txt").read_bytes() == b"\xffraw"
    assert parse_run((directory / "results.jsonl").read_bytes(), "x").head.name == NAME
    assert sorted(path.name for path in tmp_path.iterdir()) == ["h100"]


@pytest.mark.parametrize(
    "stream",
    [
        sent((f"h100/{NAME}/raw", None)),
        sent(("h100/another-vm/results.jsonl", b"{}")),
        sent((f"a100/{NAME}/results.jsonl", b"{}")),
        sent((f"h100/{NAME}/../another-vm/results.jsonl", b"{}")),
        sent((f"/h100/{NAME}/a/b/c", b"")),
        sent((f"h100/{NAME}/\x1b[2J", b"")),
        sent(name="another"),
        sent(run=False),
        sent((f"../{NAME}/results.jsonl", b"{}"), run=False),
        io.BytesIO(b""),
        io.BytesIO(b"no tar" * 1000),
        io.BytesIO(sent().getvalue()[:700]),
    ],
)
def test_anything_but_one_run_is_refused_and_leaves_nothing(
    stream: io.BytesIO, tmp_path: Path
) -> None:
    stream.seek(0)
    with pytest.raises(InputError):
        receive_run(stream, tmp_path, NAME)
    assert not [path for path in tmp_path.rglob("*") if path.name != "h100"]


def test_a_guest_cannot_fill_the_volume(tmp_path: Path) -> None:
    class Endless(io.RawIOBase):
        given = 0

        def read(self, size: int = -1) -> bytes:
            self.given += size
            return bytes(size)

    endless = Endless()
    with pytest.raises(InputError, match="at most"):
        receive_run(endless, tmp_path, NAME)  # type: ignore[arg-type]
    assert endless.given < 2 * MAX_RECEIVED_BYTES
    assert not list(tmp_path.iterdir())


def test_a_run_that_is_there_stays_as_it_is(tmp_path: Path) -> None:
    there = tmp_path / "h100" / NAME
    there.mkdir(parents=True)
    (there / "results.jsonl").write_text("another VM's")
    with pytest.raises(HostError, match="a run of this name exists"):
        receive_run(sent(), tmp_path, NAME)
    assert (there / "results.jsonl").read_text() == "another VM's"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["h100"]


def test_a_link_in_the_runs_place_is_not_followed(tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    results = tmp_path / "results"
    (results / "h100").mkdir(parents=True)
    (results / "h100" / NAME).symlink_to(elsewhere)
    with pytest.raises(HostError):
        receive_run(sent(), results, NAME)
    (results / "h100" / NAME).unlink()
    (results / "h100").rmdir()
    (results / "h100").symlink_to(elsewhere)
    with pytest.raises(HostError):
        receive_run(sent(), results, NAME)
    assert not list(elsewhere.iterdir())
