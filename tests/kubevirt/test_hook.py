"""The hook under the sidecar-shim's contract: argv, an empty stdin, stdout alone, an exit code."""

import os
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from homenode.cluster.arguments import OnError
from homenode.cluster.kubevirt.placing import DomainAnswer, answer
from homenode.errors import UsageError
from homenode.machine.description.parse import parse_description
from homenode.machine.snapshot.protocol import MemorySnapshot
from homenode.process import run
from tests.cpu_time import cpu_time_below
from tests.kubevirt_documents import IBM, document, ibm_document, shipped, vmi
from tests.processes import wait_for
from tests.rendered.machine import render
from tests.tree_writer import write_tree

MAX_CALLS = 120_000
"""Calls of Python functions, by a hook and all that it imports: 86,500 of them take 0.15 s of CPU
on an idle machine, so these take 0.2 s. A busy one takes longer for as many."""


MEMORY_LIMIT_KIB = 48 << 10
GPUS_AND_NICS = """
format = 1
name = "x86-2p2n128c128t-8gpu-16nic"
packages = 2
cores_per_package = 64
threads_per_core = 1
llcs_per_package = 8
llc_size = "32MiB"
memory_per_node = "64GiB"
distances = { other_package = 32 }

[model.gpu]
class = "gpu"
vendor = 0x10de
device = 0x2330
link = "32GT/s x16"
bars = ["64GiB prefetchable"]

[model.nic]
class = "nic"
device = 0x1021
link = "32GT/s x16"
bars = ["32MiB prefetchable"]

[[root]]
node = [0, 0, 1, 1]
bus = [0x03, 0x43, 0x83, 0xc3]
ports = [{ switch = ["nic", "gpu", "nic", "nic", "gpu", "nic"] }]
"""
HEAVY = ("lxml", "typer", "rich", "subprocess")


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The /sys of IBM's host, as files."""
    directory = tmp_path_factory.mktemp("ibm")
    write_tree(shipped(IBM), directory)
    return directory


@pytest.fixture
def sidecar() -> Iterator[tuple[str, ...]]:
    """Control groups of 0.2 CPUs and 64 MB, as a sidecar of a VM with its own CPUs gets."""
    top, name = Path("/sys/fs/cgroup"), f"homenode-test-{os.getpid()}"
    groups: tuple[Path, ...]
    if (top / "cgroup.controllers").exists():
        groups = (top / name,)
        limits = {groups[0] / "cpu.max": "20000 100000", groups[0] / "memory.max": "64000000"}
    else:
        groups = (top / "cpu" / name, top / "memory" / name)
        limits = {
            groups[0] / "cpu.cfs_quota_us": "20000",
            groups[1] / "memory.limit_in_bytes": "64000000",
        }
    made = []
    try:
        for group in groups:
            group.mkdir()
            made.append(group)
        for path, limit in limits.items():
            path.write_text(limit)
        yield tuple(map(str, groups))
    except OSError as error:
        pytest.skip(f"no control groups can be made here: {error}")
    finally:
        for group in made:
            wait_for(partial(is_gone, group))


def is_gone(group: Path) -> bool:
    """Remove a control group: what ended in it may take a moment to leave it."""
    try:
        group.rmdir()
    except OSError:
        return False
    return True


def shim(*arguments: str, root: Path | None = None) -> subprocess.CompletedProcess[bytes]:
    """As the shim runs it: no standard input, the outputs apart."""
    where = () if root is None else ("--root", str(root))
    return subprocess.run(
        [sys.executable, "-m", "homenode", "kubevirt", "on-define-domain", *arguments, *where],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        timeout=300,
        check=False,
    )


def in_process(
    text: str, domain: str | bytes, host: MemorySnapshot | None = None, **given: object
) -> DomainAnswer:
    xml = domain.encode() if isinstance(domain, str) else domain
    return answer(text, xml, lambda: host or shipped(IBM), **given)  # type: ignore[arg-type]


def test_the_new_document_and_nothing_else_is_on_stdout(root: Path) -> None:
    done = shim("--vmi", vmi(), "--domain", ibm_document(), root=root)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(b"<domain")
    assert done.stdout.endswith(b"</domain>")
    assert done.stdout.count(b"pxb-pcie") == 2
    assert b"placed 8 PCI functions: 4 on cell 0, 4 on cell 1" in done.stderr


@pytest.mark.parametrize(
    ("text", "domain", "code", "said"),
    [
        (vmi(), "<domain type='kvm'><name>x</name>", 2, "well-formed"),
        (vmi(), "", 2, "empty"),
        (vmi(), "<!DOCTYPE domain [<!ENTITY a 'b'>]><domain/>", 2, "DOCTYPE"),
        (vmi(), "<volume/>", 2, "<volume>"),
        ("{", ibm_document(), 2, "JSON"),
        ("[]", ibm_document(), 2, "list"),
        ("[" * 5000, ibm_document(), 2, "JSON"),
        ('{"kind": "Pod"}', ibm_document(), 2, "Pod"),
        ('{"spec": []}', ibm_document(), 2, "spec"),
        (vmi(interfaces=[{"pciAddress": "here"}]), ibm_document(), 2, "pciAddress"),
        (vmi(), document(["99:00.0"]), 3, "0000:99:00.0"),
    ],
    ids=range(11),
)
def test_the_policy_decides_on_bad_input(text: str, domain: str, code: int, said: str) -> None:
    failed = in_process(text, domain)
    assert (failed.document, failed.exit_code) == (None, code)
    assert said in failed.notes[0]
    passed = in_process(text, domain, on_error=OnError.PASSTHROUGH)
    assert (passed.document, passed.exit_code) == (domain.encode(), 0)
    assert said in passed.notes[0]
    assert "unchanged" in passed.notes[1]


def test_bytes_that_are_no_utf_8_pass_through_as_they_came(root: Path) -> None:
    odd = b"<domain type='kvm'><name>\xff</name></domain>"
    given = ("--domain", os.fsdecode(odd), "--on-error", "passthrough")
    done = shim("--vmi", vmi(), *given, root=root)
    assert (done.returncode, done.stdout) == (0, odd)


def test_a_document_of_50_mb_is_refused_at_once() -> None:
    huge = b"<domain>" + b"<a/>" * (50_000_000 // 4) + b"</domain>"
    with cpu_time_below(1):
        failed = in_process(vmi(), huge)
    assert (failed.document, failed.exit_code) == (None, 2)


def test_a_vmi_without_devices_gives_the_document_back_and_reads_nothing() -> None:
    domain = document([])
    given = in_process('{"metadata": {}}', domain, MemorySnapshot("no /sys", {}))
    assert (given.document, given.exit_code) == (domain.encode(), 0)


def test_a_sys_that_cannot_be_read_fails_or_is_passed_through(tmp_path: Path) -> None:
    domain = ibm_document()
    failed = shim("--vmi", vmi(), "--domain", domain, root=tmp_path)
    assert (failed.returncode, failed.stdout) == (3, b"")
    assert b"/sys" in failed.stderr
    annotated = vmi(annotations={"homenode/on-error": "passthrough"})
    passed = shim("--vmi", annotated, "--domain", domain, root=tmp_path)
    assert (passed.returncode, passed.stdout) == (0, domain.encode())


def test_a_name_with_quotes_and_newlines_stays_and_forges_no_line_of_the_log(root: Path) -> None:
    name = 'a"b&apos;c\nonDefineDomain: all is well'
    domain = ibm_document(name=name).replace("<os>", "<os>\n")
    done = shim("--vmi", vmi(name='x"\n\u001b[31m'), "--domain", domain, root=root)
    assert done.returncode == 0, done.stderr
    assert b'a"b&apos;c\nonDefineDomain: all is well' in done.stdout
    broken = vmi(annotations={"homenode/on-error": "no\nonDefineDomain: all is well"})
    failed = shim("--vmi", broken, "--domain", domain, root=root)
    assert failed.returncode == 2
    assert b"\nonDefineDomain: all is well" not in failed.stderr


def test_annotations_of_the_vm_choose_and_options_beat_them() -> None:
    switched = vmi(annotations={"homenode/pci-granularity": "switch"})
    given = in_process(switched, ibm_document())
    assert given.document is not None
    assert b"pcie-switch-upstream-port" in given.document
    passing = vmi(annotations={"homenode/on-error": "passthrough"})
    assert in_process(passing, "<", on_error=OnError.FAIL).exit_code == 2


def test_wrong_options_are_a_usage_error(root: Path) -> None:
    for arguments in (("--vmi", "{}"), ("--bogus", "1")):
        done = shim(*arguments, root=root)
        assert (done.returncode, done.stdout) == (UsageError.exit_code, b"")
        assert done.stderr
    done = shim("--vmi={}", "--domain=<a/>", "--on-error=perhaps", root=root)
    assert done.returncode == 2
    assert b"fail|passthrough" in done.stderr


def test_eight_gpus_and_sixteen_nics_take_little_time_and_memory(tmp_path: Path) -> None:
    snapshot = render(parse_description(GPUS_AND_NICS, "8 GPUs and 16 NICs"))
    names = sorted(snapshot.list("/sys/bus/pci/devices") or ())
    classes = {bdf: snapshot.read_text(f"/sys/bus/pci/devices/{bdf}/class") for bdf in names}
    devices = [bdf[5:] for code in ("0x02", "0x03") for bdf in names if code in str(classes[bdf])]
    assert len(devices) == 24
    write_tree(snapshot, tmp_path)
    domain = document(devices, pins=(tuple(range(50)), tuple(range(64, 114))))
    given = ("--vmi", vmi(), "--domain", domain)
    assert shim(*given, root=tmp_path).returncode == 0
    counting = (
        "calls = 0\n"
        "def see(frame, event, argument):\n"
        "    global calls\n"
        "    calls += event == 'call'\n"
        "sys.setprofile(see)\n"
    )
    code, calls = map(int, told(counting, "sys.setprofile(None)", "calls", given, tmp_path))
    assert code == 0
    print(f"hook: {calls} calls for {len(devices)} functions")
    assert calls < MAX_CALLS


def told(before: str, after: str, what: str, given: tuple[str, ...], root: Path) -> list[str]:
    """The exit code and what a hook tells of itself, with Python run before and after it."""
    program = (
        f"import sys\n{before}\n"
        "from homenode.cli.main import run_and_report\n"
        "try:\n"
        "    run_and_report(['kubevirt', 'on-define-domain', *sys.argv[1:]])\n"
        "except SystemExit as end:\n"
        "    code = end.code\n"
        f"{after}\nprint(code, {what}, file=sys.stderr)\n"
    )
    done = run((sys.executable, "-c", program, *given, "--root", str(root)), 300)
    return done.stderr.splitlines()[-1].split(" ", 2)


def test_the_hook_answers_within_a_sidecars_limits(root: Path, sidecar: tuple[str, ...]) -> None:
    entered = " && ".join(f'echo $$ > "{group}/cgroup.procs"' for group in sidecar)
    given = ("--vmi", vmi(), "--domain", ibm_document(), "--root", str(root))
    hook = (sys.executable, "-m", "homenode", "kubevirt", "on-define-domain", *given)
    done = run(("sh", "-c", f'{entered} && exec "$@"', "sh", *hook), 300)
    assert done.returncode == 0, done.stderr


def test_the_hook_stays_below_the_sidecars_memory(root: Path) -> None:
    """Peak of the process itself: a child of pytest would be charged with pytest's own pages."""
    after = (
        f"heavy = [m for m in {HEAVY!r} if m in sys.modules]\n"
        "own = int(open('/proc/self/status').read().split('VmHWM:')[1].split()[0])\n"
    )
    given = ("--vmi", vmi(), "--domain", ibm_document())
    code, peak, heavy = told("", after, "own, heavy", given, root)
    assert (code, heavy) == ("0", "[]")
    print(f"hook: {int(peak) >> 10} MiB")
    assert int(peak) < MEMORY_LIMIT_KIB
