"""A paste, whatever is in it, gets one answer that fits a screen."""

import json
import random
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from homenode.catalogue import catalogue, entry_of
from homenode.errors import InputError
from homenode.why.answer import answer
from homenode.why.message import Message, Sure, rows, signs, variants
from homenode.why.pasted import as_printed
from homenode.why.pieces import pieces
from tests.command_line import homenode
from tests.doc_pages import ROOT
from tests.doctor_domains import domain

ERROR = (
    "kvm: -device vfio-pci,host=0000:01:00.0,id=hostpci0: VFIO_MAP_DMA failed: "
    "Cannot allocate memory"
)
QM = "cores: 8\ncpu: host\nhostpci0: 0000:01:00,pcie=1\nmemory: 65536\nname: gpu\nsockets: 1\n"
NUMACTL = """available: 2 nodes (0-1)
node 0 cpus: 0 1 2 3
node 0 size: 64000 MB
node 0 free: 60000 MB
node 1 cpus: 4 5 6 7
node 1 size: 64000 MB
node 1 free: 60000 MB
node distances:
node   0   1
  0:  10  21
  1:  21  10
"""
LSPCI = """00:01.0 PCI bridge [0604]: Intel Corporation Device [8086:a70d] (rev 01)
\tBus: primary=00, secondary=01, subordinate=01, sec-latency=0
01:00.0 VGA compatible controller [0300]: NVIDIA Corporation Device [10de:2684] (rev a1)
\tRegion 0: Memory at 41000000 (32-bit, non-prefetchable) [size=16M]
"""


def _kinds(text: str) -> list[str]:
    return [piece.kind for piece in pieces(text, "paste")]


def test_a_paste_of_a_prompt_files_and_logs_is_parted_into_what_it_is_of() -> None:
    xml = domain(4, ()).decode()
    paste = "\n".join(
        (
            "my VM does not start:",
            "root@pve:~# qm config 100",
            QM,
            f"root@pve:~# qm start 100\n{ERROR}\n$ numactl -H",
            NUMACTL,
            "```",
            LSPCI,
            "```",
            xml,
        )
    )
    assert _kinds(paste) == ["qm", "numactl", "lspci", "domain"]
    said = answer([("paste", paste)])
    assert said.causes[0].finding.id == "vfio-memory-lock"
    assert said.causes[0].shown_by == f"paste:11: {ERROR}"
    assert not said.gaps


@pytest.mark.parametrize("parts", [(QM, NUMACTL), (NUMACTL, LSPCI), (ERROR, LSPCI, QM)])
def test_the_order_of_files_does_not_change_what_is_found(parts: tuple[str, ...]) -> None:
    there = answer([(f"file-{n}", text) for n, text in enumerate(parts)])
    back = answer([(f"file-{n}", text) for n, text in reversed([*enumerate(parts)])])
    assert {c.finding.id for c in there.causes} == {c.finding.id for c in back.causes}
    assert there.causes[:1] == back.causes[:1]


def test_each_message_has_a_cause_a_fix_and_what_confirms_it() -> None:
    for row in rows():
        entry = entry_of(row.id)
        assert row.texts.strip() == row.texts.strip().lower() or "~" in row.texts, row.id
        assert entry.parts["Fix"], row.id
        own = entry.page.startswith("messages-")
        assert not own or (entry.parts["Confirm"] and entry.parts["Send"]), row.id
    assert len({(row.id, row.sure) for row in rows()}) == len(rows())
    texts = [(row.id, text) for row in rows() for text in row.texts.splitlines()]
    assert len(set(texts)) == len(texts), "a text is twice in its row"


def test_each_text_of_each_message_is_found_in_a_line_that_has_it() -> None:
    for row in rows():
        for text in row.texts.splitlines():
            parts = (part.removeprefix("@") for part in text.split(" & ") if part[0] != "!")
            choices = [[*variants(part)] for part in parts]
            for n in range(max(map(len, choices))):
                wanted = [part[n % len(part)] for part in choices]
                line = " 0000:01:00.0 ".join(wanted).removesuffix("$").upper()
                found = [sign.id for sign in signs(f"before\n{line}\nafter", "log", (row,))]
                assert found == [row.id], text


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("pci 0000:01:00.0: BAR 1: no space for [mem size 0x800000000 64bit pref]", True),
        ("pci 0000:01:00.0: BAR 1 [mem size 0x800000000 64bit pref]: can't assign; no space", True),
        ("pci 0000:00:1c.0: BAR 13: no space for [io  size 0x1000]", False),
        ("pci 0000:01:00.0: BAR 6: failed to assign [mem size 0x00080000 pref]", False),
        ("pci 0000:3b:00.0: BAR 7: failed to assign [mem size 0x00800000 64bit pref]", False),
    ],
)
def test_windows_and_roms_that_every_machine_lacks_are_no_bar_without_an_address(
    line: str, *, expected: bool
) -> None:
    said = answer([("dmesg", f"[    1.000000] {line}")])
    assert [c.finding.id for c in said.causes] == ["pci-bar-unplaced"] * expected


def test_a_line_that_names_no_cause_is_not_enough_and_a_better_one_goes_before_it() -> None:
    last = "RuntimeError: NCCL error: unhandled system error"
    alone = answer([("log", last)])
    assert (alone.sure, alone.causes[0].finding.id) == (Sure.NOT_ENOUGH, "nccl-fault-unnamed")
    both = answer([("log", f"{last}\nError while creating shared memory segment nccl-x")])
    assert both.causes[0].finding.id == "nccl-shm-small"


def test_a_finding_of_a_log_of_nccl_quotes_the_line_that_shows_it() -> None:
    log = (ROOT / "demo/samples/nccl.log").read_text()
    for paste, line in ((log, 2), (f"it is slow\n\n{NUMACTL}\n{log}", NUMACTL.count("\n") + 5)):
        said = answer([("paste", paste)])
        assert said.causes[0].finding.id == "nccl-log-socket"
        shown = (said.causes[0].shown_by or "").partition(": ")
        assert shown[0] == f"paste:{line}" and shown[2].endswith("NET/IB : No device found.")
        assert said.read[-1].lines == log.count("\n")


def test_nothing_that_is_known_is_not_enough_and_says_what_to_send() -> None:
    said = answer([("paste", "it is slow, please help\n")])
    assert (said.sure, said.causes) == (Sure.NOT_ENOUGH, ())
    assert said.send


@given(st.binary(max_size=2000))
@settings(max_examples=60, deadline=None)
def test_any_bytes_end_in_an_answer(data: bytes) -> None:
    text = data.decode("utf-8", "replace")
    answer([("paste", text + "\nxid (\n<domain\n01:00.0 x\n" + text)])


HOSTILE = {
    "nested": "<domain>" * 50_000,
    "bomb": '<!DOCTYPE a [<!ENTITY b "c">]><domain type="kvm">&b;</domain>',
    "line": "x" * 4_000_000,
    "numbers": NUMACTL.replace("64000", "9" * 5000),
    "codes": f"\x1b[2J\x9b\u202e{ERROR}\x1b]0;x\x07",
    "listing": LSPCI * 4_000,
    "yaml": "apiVersion: v1\nkind: Pod\n" + "a: &a [*a]\n" * 1000,
    "json": '{"kubeletconfig":' + "[" * 100_000,
    "command": "/usr/bin/kvm -device 'vfio-pci\n",
    "keys": "memory: 1\n" * 100_000,
    "nccl": "a:1:2 [0] NCCL INFO Channel 00/99999999 : " + "1 " * 100_000,
    "million": "<domain>" + "<a>" * 1_000_000 + "</a>" * 1_000_000,
    "brackets": '{"kubeletconfig":' + "[" * 1_000_000 + "]" * 1_000_000,
    "zeros": f"{ERROR}\n" * 100 + "\0" * 200 + f"{ERROR}\n",
    "bytes": f"\udcff\udcc0\udc80{ERROR}\udcf8\n" * 1000,
    "titles": f"\x1b]0;{ERROR}" * 20_000,
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_paste_ends_in_words(name: str) -> None:
    begun = time.process_time()
    result = homenode("why", "-", input=HOSTILE[name].encode(errors="surrogateescape"))
    assert time.process_time() - begun < 10
    assert result.exit_code in (0, 1)
    assert result.exception is None
    assert all(one.isprintable() or one == "\n" for one in result.stdout)
    assert len(result.stdout) < 8000


@pytest.mark.parametrize(
    ("pasted", "found"),
    [
        ("\0" * 100_000, "binary data"),
        (random.Random(1).randbytes(100_000), "binary data"),
        ("\n \n", "nothing"),
    ],
)
def test_what_is_no_text_is_refused_by_name(pasted: str | bytes, found: str) -> None:
    result = homenode("why", "-", input=pasted)
    assert isinstance(result.exception, InputError)
    assert result.exception.message.endswith(f"found {found}")


def test_json_of_kubectl_is_read_as_yaml_is() -> None:
    samples = ROOT / "demo" / "samples"
    result = homenode(
        *("why", samples / "vmi.json", samples / "kubelet.json", "--host", "hgx-a100-ibm")
    )
    assert "(pod-refused)" in result.stdout.splitlines()[2]
    one_line = json.dumps(json.loads((samples / "vmi.json").read_text()))
    alone = answer([("vmi.json", one_line)])
    assert all(cause.finding.expected != "no such line" for cause in alone.causes)


def test_an_answer_fits_a_screen_of_80_columns() -> None:
    result = homenode("why", "-", input=f"{ERROR}\n{QM}\n{NUMACTL}", env={"COLUMNS": "80"})
    lines = result.stdout.splitlines()
    assert len(lines) <= 24
    assert all(len(line) <= 80 for line in lines)


def test_each_id_of_a_message_is_on_a_page() -> None:
    assert {row.id for row in rows()} <= catalogue().keys()


LONG = {
    "dmesg": "".join(
        f"[{at:6}.0] pci 0000:{at % 256:02x}:00.0: BAR 1: ok\n" for at in range(50_000)
    ),
    "nccl": "".join(
        f"n{at % 99}:1:2 [0] NCCL INFO Channel {at}/0 : 7[7] -> 8[0] [send] via NET/IB/0/GDRDMA\n"
        for at in range(25_000)
    ),
    "lspci": LSPCI * 2_000,
    "line": "vfio-pci 0000:01:00.0: ok " * 80_000,
    "words": "".join(random.Random(1).choices("abc =:[]{}<>/-\n0", k=2_000_000)),
}


@pytest.mark.parametrize("kind", LONG)
def test_two_megabytes_of_a_kind_are_never_slow(kind: str) -> None:
    begun = time.process_time()
    answer([("paste", LONG[kind])])
    assert time.process_time() - begun < 2


def test_work_grows_as_the_paste_does() -> None:
    """Lines that all differ, which is the worst for the search."""
    letters = random.Random(1)
    words = ["cannot", "memory", "failed", "node", "vfio", "numa", "error", "topology", "x"]
    lines = [" ".join(letters.choices(words, k=10)) for _ in range(60_000)]

    def seconds(count: int) -> float:
        begun = time.process_time()
        answer([("log", "\n".join(lines[:count]))])
        return time.process_time() - begun

    seconds(1000)
    assert seconds(60_000) < 8 * seconds(15_000) + 0.2


def test_lines_that_differ_in_digits_are_one_line_of_a_message_that_has_none() -> None:
    rows = (Message("gpu-off-the-bus", Sure.CERTAIN, "has fallen off"),)
    log = "".join(f"[{n}] GPU {n} has fallen off\n" for n in range(9))
    (sign,) = signs(log, "log", rows)
    assert (sign.line, sign.count) == (1, 9)


XID = "NVRM: Xid (PCI:0000:01:00): 79, GPU has fallen off the bus."
PASTED = {
    "as it is": lambda line: line,
    "Windows' line ends": lambda line: f"{line}\r",
    "quoted": lambda line: f"> {line}",
    "quoted twice": lambda line: f"> > {line}",
    "coloured": lambda line: f"\x1b[31m{line}\x1b[0m",
    "indented": lambda line: f"    {line}",
    "of containerd": lambda line: f"2026-10-19T14:25:03.801614288+08:00 stderr F {line}",
    "of Docker": lambda line: json.dumps({"log": f"{line}\n", "time": ""}, separators=(",", ":")),
    "of the journal": lambda line: f"Feb 14 05:03:42 host kernel: {line}",
    "curly": lambda line: line.replace("'", "\u2019"),
}


@pytest.mark.parametrize("way", PASTED)
def test_a_paste_is_read_as_it_was_printed(way: str) -> None:
    numactl = NUMACTL.splitlines()
    lines = [*numactl, XID] if way != "of the journal" else [XID]
    said = answer([("paste", "\n".join(map(PASTED[way], lines)))])
    assert said.causes[0].finding.id == "gpu-off-the-bus"
    assert (said.causes[0].shown_by or "").startswith(f"paste:{len(lines)}: ")
    assert way == "of the journal" or said.read[0].what == "numactl -H"


def test_xml_keeps_its_signs_and_its_lines() -> None:
    text = "<domain type='kvm'>\n  <title>a &lt; b</title>\n> \n</domain>"
    assert as_printed(text) == text


MATRIX = """\tGPU0\tGPU1\tNIC0\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID
GPU0\t X \tSYS\tPIX\t0-47\t0\t\tN/A
GPU1\tSYS\t X \t{}\t48-95\t1\t\tN/A
NIC0\tPIX\t{}\t X
"""


@pytest.mark.parametrize(("way", "found"), [("SYS", ["nccl-nic-far"]), ("NODE", [])])
def test_a_gpu_without_a_nic_on_its_side_is_named(way: str, found: list[str]) -> None:
    said = answer([("topo", MATRIX.format(way, way))])
    assert [cause.finding.id for cause in said.causes] == found


@pytest.mark.parametrize(("rate", "found"), [("14.20", ["gpu-link-differs"]), ("55.90", [])])
def test_a_gpu_whose_copies_are_slower_than_its_neighbours_is_named(
    rate: str, found: list[str]
) -> None:
    paste = (
        "Running host_to_device_memcpy_ce.\nmemcpy CE CPU(row) -> GPU(column) bandwidth (GB/s)\n"
        f"           0         1         2\n 0     {rate}     57.06     56.68\n\nSUM\n"
    )
    said = answer([("nvbandwidth", paste)])
    assert [cause.finding.id for cause in said.causes if cause.finding.is_bad] == found
    assert all(cause.finding.subject == "GPU 0" for cause in said.causes)


def test_a_listing_of_the_gpu_alone_lacks_its_port() -> None:
    alone = """01:00.0 3D controller [0302]: NVIDIA Corporation GH100 [10de:2330] (rev a1)
\tCapabilities: [60] Express (v2) Endpoint, MSI 00
\t\tLnkCap:\tPort #0, Speed 32GT/s, Width x16, ASPM not supported
\t\tLnkSta:\tSpeed 32GT/s, Width {}
"""
    for width, sure in (("x16", Sure.NOT_ENOUGH), ("x8 (downgraded)", Sure.POSSIBLE)):
        said = answer([("gpu", alone.format(width))])
        assert said.sure is sure
        assert "port above" in said.send


def test_a_text_anywhere_in_the_paste_tells_two_causes_of_one_line_apart() -> None:
    rows = (
        Message("nccl-memory-lock", Sure.CERTAIN, "no mr & !@cuda"),
        Message("nccl-gdr-register", Sure.LIKELY, "no mr & @cuda"),
    )
    for begin, found in (("", "nccl-memory-lock"), ("--use_cuda=0", "nccl-gdr-register")):
        assert [sign.id for sign in signs(f"{begin}\nno MR", "log", rows)] == [found]


def test_words_that_people_say_are_found_at_either_end_whatever_is_between_them() -> None:
    text = "@{ hang| stuck} & @ all reduce & !@ host b$"
    rows = (Message("nccl-p2p-hang", Sure.POSSIBLE, text),)
    long = "a line of a log\n" * 40_000
    for paste, line in (
        ("It always\n(hangs) in All-Reduce.", 2),
        (f"all\nreduce\n{long}and there it is stuck", 40_003),
        (f"{long}hangs in all\nreduce", 40_001),
    ):
        assert [sign.line for sign in signs(paste, "paste", rows)] == [line]
    for paste in (
        "I change all reduce",
        f"{long}all reduce hangs\n{long}",
        "all reduce hangs: B, host B",
    ):
        assert not [*signs(paste, "paste", rows)]


def test_a_text_that_a_line_must_not_have_rules_it_out() -> None:
    rows = (Message("kvm-missing", Sure.CERTAIN, "could not access kvm & !permission"),)
    said = "Could not access KVM kernel module: "
    assert [*signs(f"{said}No such file", "log", rows)]
    assert not [*signs(f"{said}Permission denied", "log", rows)]


def test_twenty_megabytes_take_two_seconds_on_a_quiet_core() -> None:
    """In units of what this machine takes to put a tenth of them in small letters."""
    line = "[{0}.{0:06}] pci 0000:{1:02x}:00.0: [10de:2330] type 00 class 0x030200 PCIe Endpoint"
    text = "\n".join(line.format(n, n % 255) for n in range(26_000))

    def seconds(work: object) -> float:
        begun = time.process_time()
        assert callable(work)
        work()
        return time.process_time() - begun

    unit = min(seconds(lambda: [text.lower() for _ in range(10)]) for _ in range(3))
    assert min(seconds(lambda: answer([("log", text)])) for _ in range(3)) < 60 * unit + 0.1


HEALTHY = {
    "nvidia-smi -q": """\
==============NVSMI LOG==============

Driver Version                                 : 580.159.04
Attached GPUs                                  : 1
GPU 00000000:00:06.0
    Product Name                               : NVIDIA H200
    ECC Errors
        Aggregate
            SRAM Uncorrectable Parity          : 0
            DRAM Uncorrectable                 : 0
            SRAM Threshold Exceeded            : No
    Retired Pages
        Single Bit ECC                         : N/A
        Double Bit ECC                         : N/A
    Remapped Rows
        Uncorrectable Error                    : 0
        Remapping Failure Occurred             : No
    Processes                                  : None
""",
    "nvidia-smi": """\
+------------------------------------------------------------+
| NVIDIA-SMI 580.159.04   Driver Version: 580.159.04         |
|   0  NVIDIA H200    On  |   00000000:00:06.0 Off |       0 |
+------------------------------------------------------------+

+------------------------------------------------------------+
| Processes:                                    GPU Memory   |
|  No running processes found                                |
+------------------------------------------------------------+
""",
    "a log of one host": """\
vm:1:1 [0] NCCL INFO dlvsym failed on mlx5dv_reg_dmabuf_mr - undefined symbol: mlx5dv_
vm:1:1 [0] NCCL INFO NET/IB : No device found.
vm:1:1 [0] NCCL INFO NET/IB : Using [RO]; OOB eth0:192.0.2.2<0>
vm:1:1 [0] NCCL INFO Failed to initialize NET plugin IB
vm:1:1 [0] NCCL INFO Initialized NET plugin Socket
vm:1:1 [0] NCCL INFO NET/Socket : GPU Direct RDMA Disabled for HCA 0 'eth0'
vm:1:1 [0] NCCL INFO comm 0x1 rank 0 nranks 1 cudaDev 0 busId 60 - Init COMPLETE
""",
    "a kernel's log": """\
[    0.000843] No NUMA configuration found
[    0.578173] nvidia-nvlink: Nvlink Core is being initialized, major device number 240
[    0.612000] bridge: filtering via arp/ip/ip6tables is not available by default
[    0.700000] pci 0000:00:04.0: not detected as a 3090
""",
}
"""What a sound machine with one H200 printed, shortened."""


@pytest.mark.parametrize("name", HEALTHY)
def test_outputs_of_a_sound_machine_show_no_fault(name: str) -> None:
    assert answer([("paste", HEALTHY[name])]).causes == ()


def test_a_field_that_counts_errors_is_a_sign() -> None:
    text = HEALTHY["nvidia-smi -q"].replace(
        "Double Bit ECC                         : N/A", "Double Bit ECC                         : 3"
    )
    (cause,) = answer([("paste", text)]).causes
    assert cause.finding.id == "gpu-memory-errors"


def test_a_traceback_is_not_what_somebody_says() -> None:
    text = """\
Traceback (most recent call last):
  File "<frozen runpy>", line 198, in _run_module_as_main
    nccl_all_reduce(rtx_gpus)
RuntimeError: no
"""
    assert answer([("paste", text)]).sure is Sure.NOT_ENOUGH


def test_a_line_that_a_cause_names_is_not_said_to_be_unnamed() -> None:
    line = (
        "[  201.910706] NVRM: Xid (PCI:0000:00:06): 31, pid=1791, name=python3, MMU Fault: ENGINE "
        "GRAPHICS GPC0 GPCCLIENT_T1_8 faulted @ 0x0_00000000. Fault is of type FAULT_PDE"
    )
    said = answer([("dmesg", line)])
    assert said.causes == ()
    assert said.worth_knowing[0].finding.id == "gpu-program-fault"
