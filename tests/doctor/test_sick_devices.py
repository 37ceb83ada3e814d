"""Faults of single devices and nodes, as lspci and sysfs show them: each is named, with its device.

The listing is that of a real HGX H100, edited; the other machines are shipped descriptions, whose
rendered files are edited. Nothing of a fault is said of the sound machine.
"""

import re
from collections.abc import Callable, Mapping
from functools import cache

import pytest

from homenode.bdf import Bdf
from homenode.check.doctor.diagnosis import diagnose
from homenode.findings import Finding
from homenode.machine.description.parse import load_shipped
from homenode.machine.discover.host import discover
from homenode.machine.discover.lspci import host_from_lspci
from homenode.machine.snapshot.protocol import MemorySnapshot
from tests.rendered.machine import render
from tests.shared_data import needs_shared, shared

LISTING = "machines/lspci/gpud-hgx-h100x8-lspci-vvv.txt"

Files = dict[str, str]
Edit = Callable[[Files], None]


@cache
def listing() -> str:
    return shared(LISTING).read_text()


def entry(address: str) -> str:
    found = re.search(rf"^{re.escape(address)} .*?(?=\n\n|\Z)", listing(), re.M | re.S)
    assert found is not None
    return found[0]


def edited(address: str, old: str, new: str) -> str:
    """The listing with a pattern of one function replaced, wherever that function has it."""
    before = entry(address)
    assert re.search(old, before), (address, old)
    return listing().replace(before, re.sub(old, new, before))


def named(findings: tuple[Finding, ...], sound: tuple[Finding, ...]) -> set[tuple[str, str]]:
    """(id, device) of what the fault adds, and of each device; "" where there is none."""
    added = [one for one in findings if one not in sound]
    return {(one.id, str(bdf)) for one in added for bdf in one.devices or ("",)}


GPU, PORT, SWITCH, DRIVE = "4c:00.0", "4a:01.0", "84:00.0", "ca:00.0"
"""A GPU and the port above it, an NVSwitch and an NVMe drive of the listing."""

X16, X8 = "Speed 32GT/s, Width x16", "Speed 32GT/s, Width x8"
LISTED = (
    # address, what it says, what it says when it is sick, the finding
    (GPU, r"Region 2: Memory at \w+", "Region 2: Memory at <unassigned>", "bar-unassigned"),
    (GPU, r"\[size=128G\]", "[size=256M]", "bar-small"),
    (GPU, X16, X8, "device-odd"),
    (PORT, X16, X8, "device-odd"),
    (DRIVE, r"Speed 16GT/s \(ok\)", "Speed 2.5GT/s (downgraded)", "pcie-link-slow"),
    (GPU, "\tKernel driver in use: nvidia\n", "", "device-odd"),
)


@cache
def sound_listing() -> tuple[Finding, ...]:
    return diagnose(host_from_lspci(listing(), "hgx")).findings


@needs_shared
@pytest.mark.parametrize(("address", "old", "new", "expected"), LISTED)
def test_a_fault_in_a_listing_is_named_with_its_device(
    address: str, old: str, new: str, expected: str
) -> None:
    found = diagnose(host_from_lspci(edited(address, old, new), "hgx")).findings
    device = GPU if address == PORT else address
    assert (expected, f"0000:{device}") in named(found, sound_listing())


@needs_shared
@pytest.mark.parametrize("above", [0, 1, 2])
def test_a_port_above_a_gpu_that_does_not_answer_is_silent(above: int) -> None:
    host = host_from_lspci(listing(), "hgx")
    port = host.bridges_above(Bdf.parse(f"0000:{GPU}"))[above].bdf
    head, _, rest = entry(str(port)[5:]).partition("\n")
    silent = f"{head} (rev ff)\n\t!!! Unknown header type 7f\n{rest}"
    sick = listing().replace(f"{head}\n{rest}", silent)
    assert ("device-silent", str(port)) in named(
        diagnose(host_from_lspci(sick, "hgx")).findings, sound_listing()
    )


@needs_shared
def test_a_missing_nvswitch_and_a_missing_gpu_are_named() -> None:
    for address in (SWITCH, GPU):
        less = listing().replace(entry(address) + "\n\n", "")
        found = diagnose(host_from_lspci(less, "hgx")).findings
        assert ("board-incomplete", "") in named(found, sound_listing())


@cache
def rendered(name: str) -> MemorySnapshot:
    return render(load_shipped(name))


def with_edit(
    name: str, change: Edit, tools: Callable[[dict[str, str]], None] = lambda one: None
) -> tuple[Finding, ...]:
    there = rendered(name)
    files, commands = dict(there.files), dict(there.commands)
    change(files)
    tools(commands)
    edited_host = MemorySnapshot(name, files, there.links, commands, there.directories)
    return diagnose(discover(edited_host)).findings


def functions(files: Mapping[str, str], vendor: str, device: str) -> list[str]:
    """Directories of the functions with these ids, ascending by address."""
    directories = [path.removesuffix("/device") for path in files if path.endswith("/device")]
    ids = f"0x{vendor} 0x{device}".split()
    found = [
        f
        for f in directories
        if [files[f"{f}/vendor"].strip(), files[f"{f}/device"].strip()] == ids
    ]
    return sorted(found, key=lambda directory: directory.rpartition("/")[2])


def bar(first: int, size: int) -> str:
    return f"0x{first:016x} 0x{first + size - 1:016x} 0x000000000014220c\n"


def with_bar(index: int, line: str) -> Callable[[str], str]:
    def change(text: str) -> str:
        lines = text.splitlines(keepends=True)
        lines[index] = line
        return "".join(lines)

    return change


RTX = ("rtxpro6000-xeon8468v", "10de", "2bb5")
R4090 = ("rtx4090-epyc7702", "10de", "2684")
MI = ("mi350x-epyc9575f", "1002", "75a0")

A100 = ("a100-pcie-epyc7763", "10de", "20b5")  # each alone on its root complex

RENDERED: tuple[tuple[tuple[str, str, str], int, str, str | Callable[[str], str], str], ...] = (
    # machine and ids of the device; 1 where its port's file is edited; file, text, the finding
    (RTX, 0, "resource", with_bar(1, bar(0, 128 << 30)), "bar-unassigned"),
    (RTX, 0, "resource", with_bar(1, bar(1 << 40, 256 << 20)), "bar-small"),
    (RTX, 1, "max_link_width", "8", "device-odd"),
    (RTX, 1, "max_link_speed", "16.0 GT/s PCIe", "device-odd"),
    (RTX, 0, "aer_dev_fatal", "DLP 2\nTOTAL_ERR_FATAL 2", "pcie-errors-uncorrected"),
    (RTX, 0, "aer_dev_nonfatal", "CmpltTO 40", "pcie-errors-uncorrected"),
    (RTX, 0, "aer_dev_correctable", "BadTLP 90000", "pcie-errors-corrected"),
    (A100, 0, "numa_node", "0", "device-odd"),
    (RTX, 0, "numa_node", "1", "device-odd"),  # than its switch
    (R4090, 0, "resource", with_bar(1, bar(1 << 40, 64 << 20)), "device-odd"),
    (MI, 0, "current_link_speed", "16.0 GT/s PCIe", "pcie-link-slow"),
    (MI, 0, "current_link_width", "4", "pcie-link-narrow"),
)


def with_counters(files: Files, gpus: list[str]) -> None:
    for directory in gpus:
        files.setdefault(f"{directory}/aer_dev_correctable", "BadTLP 3")


@pytest.mark.parametrize(("model", "above", "file", "text", "expected"), RENDERED)
def test_a_fault_in_sysfs_is_named_with_its_device(
    model: tuple[str, str, str],
    above: int,
    file: str,
    text: str | Callable[[str], str],
    expected: str,
) -> None:
    name, vendor, device = model
    gpus = functions(rendered(name).files, vendor, device)
    assert len(gpus) >= 3
    sick = gpus[2]

    def change(files: Files) -> None:
        with_counters(files, gpus)
        path = f"{sick.rsplit('/', above)[0]}/{file}"
        files[path] = f"{text}\n" if isinstance(text, str) else text(files[path])

    found = with_edit(name, change)
    sound = with_edit(name, lambda files: with_counters(files, gpus))
    assert (expected, sick.rpartition("/")[2]) in named(found, sound)


def test_lost_links_between_gpus_are_named() -> None:
    def fewer(commands: dict[str, str]) -> None:
        lines = commands["nvidia-smi-topo"].splitlines()
        row = next(i for i, line in enumerate(lines) if line.startswith("GPU3"))
        place = lines[row].split("\t").index(" X ") if " X " in lines[row].split("\t") else None
        lines[row] = lines[row].replace("NV18", "NV12")
        for i, line in enumerate(lines):
            if line.startswith("GPU") and i != row and place is not None:
                cells = line.split("\t")
                cells[place] = cells[place].replace("NV18", "NV12")
                lines[i] = "\t".join(cells)
        commands["nvidia-smi-topo"] = "\n".join(lines) + "\n"

    found = named(with_edit("hgx-h100", lambda files: None, fewer), ())
    gpus = functions(rendered("hgx-h100").files, "10de", "2330")
    assert {bdf for name, bdf in found if name == "nvlinks-few"} == {gpus[3].rpartition("/")[2]}


def test_faults_of_nodes_are_named() -> None:
    def fewer_dimms(files: Files) -> None:
        path = "/sys/devices/system/node/node1/meminfo"
        files[path] = re.sub(
            r"(MemTotal: +)(\d+)", lambda m: f"{m[1]}{int(m[2]) * 15 // 16}", files[path]
        )

    def cap(files: Files) -> None:
        for pu in range(8):
            directory = f"/sys/devices/system/cpu/cpu{pu}/cpufreq"
            files[f"{directory}/scaling_max_freq"] = "2000000\n"
            files[f"{directory}/cpuinfo_max_freq"] = "3800000\n"

    def forget(files: Files) -> None:
        for pu in range(224):
            directory = f"/sys/devices/system/cpu/cpu{pu}/cpufreq"
            files[f"{directory}/scaling_driver"] = "intel_pstate\n"
            slow = pu in (8, 9)
            files[f"{directory}/scaling_governor"] = "powersave\n" if slow else "performance\n"

    for change, expected in (
        (fewer_dimms, "node-memory-unequal"),
        (cap, "frequency-capped"),
        (forget, "governor-mixed"),
    ):
        assert (expected, "") in named(with_edit("hgx-h100", change), ())
