"""The environment of a run, and whether a machine is QEMU's translator."""

from collections.abc import Mapping

import pytest
from msgspec import structs
from msgspec.structs import replace

from homenode.bdf import Bdf
from homenode.cpuset import CpuSet
from homenode.errors import ParseError
from homenode.findings import Severity
from homenode.machine.discover.system import read_settings
from homenode.machine.pci import DeviceKind, PciDevice, PciLink
from homenode.machine.settings import HostSettings
from homenode.machine.snapshot.protocol import MemorySnapshot
from homenode.machine.tools import proc_stat
from homenode.machine.topology import CpuModel, Host
from homenode.measure.environment import (
    Environment,
    IdleReadings,
    find_changes,
    is_emulated,
    is_virtual,
    list_conditions,
    preflight,
    read_environment,
    share_between,
)
from homenode.units import GIB
from tests.mutations import MUTATIONS, survives
from tests.small_hosts import DeviceSpec, even_host, floating_domain, pinned_domain

CPU = "/sys/devices/system/cpu"
NOTHING: Mapping[str, str] = {}
GPU = Bdf.parse("0000:19:00.0")


def stat(busy: int, idle: int, stolen: int, pus: int = 4) -> str:
    lines = [f"cpu{pu} {busy} 0 0 {idle} 0 0 0 {stolen} 0 0\n" for pu in range(pus)]
    return f"cpu  {busy} 0 0 {idle} 0 0 0 {stolen} 0 0\n{''.join(lines)}intr 1 2\nctxt 3\n"


def files(changed: Mapping[str, str]) -> dict[str, str]:
    return {
        "/proc/stat": stat(1000, 1000, 0),
        f"{CPU}/cpu0/thermal_throttle/core_throttle_count": "2\n",
        f"{CPU}/cpu1/thermal_throttle/core_throttle_count": "3\n",
        f"{CPU}/intel_pstate/no_turbo": "0\n",
        **changed,
    }


def host(**changed: object) -> Host:
    settings = HostSettings(
        kernel_release="6.8.0",
        smt_control="on",
        pus_of_governor=(("performance", CpuSet(range(4))),),
        transparent_hugepages="madvise",
        numa_balancing=0,
    )
    made = even_host(packages=2, cores_per_llc=1, devices=[DeviceSpec("0000:19:00.0")])
    return structs.replace(made, settings=settings, **changed)


def look(at: Host | None = None, changed: Mapping[str, str] = NOTHING) -> Environment:
    snapshot, made = MemorySnapshot("guest", files(changed)), at or host()
    read = read_settings(snapshot, made.online_pus, None, None)
    given = {"turbo": read.turbo, "frequency_limits": read.frequency_limits}
    settings = structs.replace(made.settings, **given)
    return read_environment(snapshot, structs.replace(made, settings=settings))


def with_link(gt_per_s: float, state: str | None) -> Host:
    made = host()
    link = PciLink(gt_per_s, 16, 32.0, 16)
    devices = tuple(
        structs.replace(d, link=link, performance_state=state) if d.bdf == GPU else d
        for d in made.pci_devices
    )
    return structs.replace(made, pci_devices=devices)


def test_a_look_holds_what_may_not_change() -> None:
    found = look()
    assert found.online == CpuSet.parse("0-3")
    assert found.memory_bytes == 128 * GIB
    assert found.throttles == (("core_throttle_count", 5),)
    assert (found.turbo, found.governors, found.gaps) == ("on", ("performance",), ())


def test_two_equal_looks_are_no_change() -> None:
    later = look(changed={"/proc/stat": stat(5000, 5000, 0)})
    assert find_changes(look(), later) == ()


@pytest.mark.parametrize(
    ("file", "text", "says"),
    [
        (f"{CPU}/cpu0/thermal_throttle/core_throttle_count", "9", "core_throttle_count rose by 7"),
        (f"{CPU}/intel_pstate/no_turbo", "1", "turbo changed"),
        ("/proc/stat", stat(1500, 1400, 100), "took 10.0% of the CPUs' time for other guests"),
    ],
)
def test_a_change_in_between_is_the_reason_to_mark_a_run(file: str, text: str, says: str) -> None:
    (reason,) = find_changes(look(), look(changed={file: text}))
    assert says in reason


def test_a_balloon_a_governor_and_a_pu_that_went_away_are_changes() -> None:
    made = host()
    smaller = structs.replace(
        made,
        nodes=tuple(structs.replace(node, memory_bytes=GIB) for node in made.nodes),
        settings=structs.replace(made.settings, pus_of_governor=(("powersave", CpuSet(range(4))),)),
        pus=(structs.replace(made.pus[0], online=False), *made.pus[1:]),
    )
    reasons = " ".join(find_changes(look(), look(smaller)))
    assert "memory changed" in reasons
    assert "governor changed" in reasons
    assert "online CPUs changed" in reasons


def test_a_link_that_fell_is_a_change_and_one_that_rests_is_none() -> None:
    busy, fallen, resting = with_link(32.0, "P0"), with_link(2.5, "P0"), with_link(2.5, "P8")
    assert "link 0000:19:00.0 changed" in find_changes(look(busy), look(fallen))[0]
    assert find_changes(look(busy), look(resting)) == ()


def test_a_gpu_that_went_away_is_a_change() -> None:
    gone = structs.replace(host(), pci_devices=())
    assert "went away" in find_changes(look(), look(gone))[0]
    assert "appeared" in find_changes(look(gone), look())[0]


def test_what_is_unknown_on_one_side_is_no_change() -> None:
    unknown = replace(look(), memory_bytes=None, governors=None, turbo=None, times=())
    assert find_changes(look(), unknown) == ()


def test_a_pu_that_counts_from_zero_again_gives_no_share() -> None:
    before, after = look(), look(changed={"/proc/stat": stat(10, 10, 0)})
    assert share_between(before, after, CpuSet.parse("0-3")) is None


def test_conditions_leave_out_what_is_unknown() -> None:
    found = {condition.name: condition.value for condition in list_conditions(look())}
    assert (found["governor"], found["turbo"]) == ("performance", "on")
    unknown = list_conditions(replace(look(), turbo=None, governors=None))
    assert not {"turbo", "governor"} & {condition.name for condition in unknown}


def test_microcode_and_clock_limits_are_conditions_and_changes() -> None:
    slow = {f"{CPU}/cpu{pu}/cpufreq/scaling_max_freq": "2600000\n" for pu in range(4)}
    fast = {**slow, f"{CPU}/cpu0/cpufreq/scaling_max_freq": "3800000\n"}
    old = {"/proc/cpuinfo": "processor\t: 0\nmicrocode\t: 0x2b000590\nflags\t\t: lm\n"}
    new = {"/proc/cpuinfo": "processor\t: 0\nmicrocode\t: 0x2b0005c0\nflags\t\t: lm\n"}
    before, after = look(changed={**slow, **old}), look(changed={**fast, **new})
    found = {condition.name: condition.value for condition in list_conditions(before)}
    assert found["clock limit"] == "2600 MHz"
    assert found["microcode"] == "0x2b000590"
    reasons = find_changes(before, after)
    assert any("clock limit changed" in one and "2600 MHz, 3800 MHz" in one for one in reasons)
    assert any("microcode changed" in one for one in reasons)


@pytest.mark.parametrize("invented", ["0x1", "0x1000065", "0xffffffff", "none"])
def test_a_microcode_that_a_hypervisor_invents_is_unknown(invented: str) -> None:
    """A CPU model of its own hides the machine's: two layouts do not differ by that."""
    seen = look(changed={"/proc/cpuinfo": f"processor\t: 0\nmicrocode\t: {invented}\n"})
    assert seen.microcode is None
    assert "microcode" not in {condition.name for condition in list_conditions(seen)}


def readings(after: str, pus: str = "0-3") -> IdleReadings:
    return IdleReadings(look(), look(changed={"/proc/stat": after}), CpuSet.parse(pus))


def test_a_quiet_machine_has_no_findings_but_its_past() -> None:
    (found,) = preflight(host(), readings(stat(1001, 1999, 0)))
    assert (found.id, found.severity) == ("bench-throttled", Severity.INFO)


def test_others_on_our_pus_are_found() -> None:
    ids = [finding.id for finding in preflight(host(), readings(stat(1500, 1400, 100)))]
    assert ids[:2] == ["bench-busy", "bench-stolen"]


def spread(of_one: tuple[int, int, int], pus: int = 64) -> str:
    """All CPUs idle for a second, and the last one as told: busy, idle and stolen ticks."""
    busy, idle, stolen = of_one
    quiet = "".join(f"cpu{pu} 1000 0 0 1100 0 0 0 0 0 0\n" for pu in range(pus - 1))
    return f"{quiet}cpu{pus - 1} {1000 + busy} 0 0 {1000 + idle} 0 0 0 {stolen} 0 0\n"


@pytest.mark.parametrize(
    ("ticks", "ids"),
    [
        ((90, 10, 0), ["bench-busy"]),
        ((0, 10, 90), ["bench-stolen"]),
        ((30, 60, 10), []),  # a daemon's burst
    ],
)
def test_a_neighbour_on_one_pu_is_found(ticks: tuple[int, int, int], ids: list[str]) -> None:
    looks = IdleReadings(
        look(changed={"/proc/stat": stat(1000, 1000, 0, 64)}),
        look(changed={"/proc/stat": spread(ticks)}),
        CpuSet.parse("0-63"),
    )
    found = [one for one in preflight(host(), looks) if one.id in ("bench-busy", "bench-stolen")]
    assert [one.id for one in found] == ids
    assert all("CPU 63 " in one.observed for one in found)


def test_what_is_stolen_from_pus_that_do_not_measure_marks_nothing() -> None:
    after = look(changed={"/proc/stat": spread((0, 100, 300), 4)})
    assert any("took" in one for one in find_changes(look(), after))
    assert not find_changes(look(), after, CpuSet.parse("0-2"))


def test_time_that_no_one_counts_is_inconclusive() -> None:
    blind = look(changed={"/proc/stat": "nothing\n"})
    assert blind.gaps[0].subject == "time of CPUs"
    found = preflight(host(), IdleReadings(blind, blind, CpuSet.parse("0-3")))
    assert "bench-load-unknown" in [finding.id for finding in found]


@pytest.mark.parametrize(
    ("state", "severity"), [("P0", Severity.WARNING), ("P8", Severity.INCONCLUSIVE)]
)
def test_a_slow_link_is_reported_unless_it_rests(state: str, severity: Severity) -> None:
    made = with_link(2.5, state)
    quiet = IdleReadings(look(made), look(made, {"/proc/stat": stat(1000, 2000, 0)}), CpuSet([0]))
    found = {finding.id: finding for finding in preflight(made, quiet)}
    assert found["bench-link"].severity is severity


def test_running_neighbours_are_named_with_their_places() -> None:
    made = structs.replace(
        host(),
        domains=(
            pinned_domain("0-1", name="near"),
            pinned_domain("2-3", name="far"),
            floating_domain(2, name="anywhere"),
            pinned_domain("0", name="off", running=False),
        ),
    )
    quiet = readings(stat(1000, 2000, 0), "0-1")
    subjects = [f.subject for f in preflight(made, quiet) if f.id == "bench-neighbour"]
    assert subjects == ["domain near", "domain anywhere"]


@pytest.mark.parametrize("text", ["", "cpu 1 2 3\n", "cpu0 1 2 3 4\ncpu0 1 2 3 4\n"])
def test_a_proc_stat_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(ParseError):
        proc_stat.parse(text)


def test_old_kernels_count_no_stolen_time() -> None:
    assert proc_stat.parse("cpu7 1 2 3 4\n")[0].stolen == 0


def test_damaged_output_is_read_or_refused() -> None:
    assert survives(proc_stat.parse, stat(5, 6, 7), MUTATIONS) > 0


PRODUCT = "/sys/devices/virtual/dmi/id/product_name"
VIRT = {"/proc/device-tree/compatible": "linux,dummy-virt\0"}


def machine(files: dict[str, str]) -> MemorySnapshot:
    return MemorySnapshot("guest", files)


def arm(vendor: str = "ARM", pci_vendor: int | None = None) -> Host:
    """An aarch64 machine, with one PCI function of that vendor or none."""
    devices: tuple[PciDevice, ...] = ()
    if pci_vendor is not None:
        bdf, bus = Bdf.parse("0000:00:00.0"), "pci0000:00"
        kind, class_code = DeviceKind.OTHER, 0x060000
        devices = (PciDevice(bdf, kind, class_code, pci_vendor, 1, bus, None, None),)
    cpu = CpuModel(vendor, None)
    return replace(even_host(), architecture="aarch64", cpu=cpu, pci_devices=devices)


@pytest.mark.parametrize(
    ("host", "files", "expected"),
    [
        # As QEMU 7.2's "virt" shows itself under TCG: -cpu max; cortex-a57 with UEFI, and without
        (arm("0x00"), VIRT, True),
        (arm("ARM"), {PRODUCT: "QEMU Virtual Machine\n"}, True),
        (arm("ARM"), VIRT, None),
        (arm("ARM"), {PRODUCT: "KVM Virtual Machine\n"}, False),
        (arm("ARM"), {PRODUCT: "OpenStack Nova\n"}, None),
    ],
)
def test_arm_guests_by_what_tells(host: Host, files: dict[str, str], expected: bool | None) -> None:
    assert is_emulated(machine(files), host) is expected


def test_an_arm_server_without_devices_of_qemu_is_none_of_its_machines() -> None:
    assert is_emulated(machine({PRODUCT: "Grace"}), arm(pci_vendor=0x10DE)) is False
    assert is_emulated(machine({PRODUCT: "Nova"}), arm(pci_vendor=0x1AF4)) is None


def test_of_x86_a_virtual_machine_tells_nothing_by_itself() -> None:
    host = replace(even_host(), architecture="x86_64")
    flags = {"/proc/cpuinfo": "processor\t: 0\nflags\t\t: fpu hypervisor lm\n"}
    assert is_emulated(machine({}), host) is False
    assert is_emulated(machine(flags), host) is None
    named = replace(host, cpu=replace(host.cpu, name="QEMU TCG CPU version 2.5+"))
    assert is_emulated(machine(flags), named) is True


def test_virtual_machines_show_it_in_one_way_or_another() -> None:
    assert is_virtual(machine({"/proc/cpuinfo": "flags\t\t: fpu hypervisor\n"}))
    assert is_virtual(machine({PRODUCT: "KVM Virtual Machine\n"}))
    assert is_virtual(machine(VIRT))
    assert not is_virtual(machine({PRODUCT: "PowerEdge", "/proc/cpuinfo": "flags\t\t: fpu\n"}))
