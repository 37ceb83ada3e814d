"""Retraining writes two fields of one port, can be undone, and is refused where it could harm."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from msgspec import structs
from msgspec.structs import replace

from homenode.bdf import Bdf
from homenode.change.journal import ChangeEntry, ChangeState
from homenode.change.retrain.config_registers import read_registers
from homenode.change.retrain.execution import (
    RetrainResult,
    RetrainStep,
    explain_interrupted,
    find_holders,
    open_retrain,
    retrain_journal,
    retrain_journals,
)
from homenode.change.retrain.plan import (
    Holders,
    RetrainError,
    RetrainPlan,
    describe,
    list_functions_behind,
    plan_retrain,
)
from homenode.errors import HostError, InputError, UsageError
from homenode.findings import Severity
from homenode.machine.discover.lspci import host_from_lspci
from homenode.machine.pci import PciDevice
from homenode.machine.topology import Host
from tests.doctor_cases import arc, changed, is_gpu
from tests.doctor_domains import gpus
from tests.doctor_domains import host as shipped
from tests.simulated_config import (
    AT,
    LINK_CONTROL,
    LINK_CONTROL_2,
    LINK_STATUS,
    MemoryJournal,
    PowerCutError,
    SimulatedConfig,
    no_wait,
    retrained,
)
from tests.small_hosts import pinned_domain

SICK = "rtx5090-epyc7702"
GPU = gpus(SICK, 1)[0]
AUDIO_LIKE = Bdf(GPU.domain, GPU.bus, GPU.device, 5)


def sick(**fields: object) -> Host:
    """The 5090 host, its GPUs given to VFIO; fields: of every function behind the first port."""
    return changed(
        shipped(SICK), lambda d: d.bdf.bus == GPU.bus, **{"driver": "vfio-pci", **fields}
    )


def unused(host: Host) -> dict[Bdf, tuple[str, ...] | None]:
    return {device.bdf: () for device in host.pci_devices}


def planned(
    host: Host,
    space: SimulatedConfig,
    target: int | None = None,
    uses: Holders | None = None,
    device: Bdf = GPU,
) -> RetrainPlan:
    return plan_retrain(host, device, space, unused(host) if uses is None else uses, target)


def carried_out(
    space: SimulatedConfig, journal: MemoryJournal | None = None
) -> tuple[RetrainPlan, RetrainResult]:
    plan = planned(space.host, space)
    return plan, retrained(plan, space, journal)


@pytest.fixture
def space() -> SimulatedConfig:
    return SimulatedConfig(sick())


def test_only_the_two_fields_of_the_port_change(space: SimulatedConfig) -> None:
    before = {bdf: bytes(content) for bdf, content in space.spaces.items()}
    plan, result = carried_out(space)
    assert result.findings == ()
    assert {(a.bdf, a.offset, a.size) for a in space.writes} == {
        (plan.port, LINK_CONTROL_2, 2),
        (plan.port, LINK_CONTROL, 2),
    }
    stated, trained = space.writes
    assert (stated.value ^ 0x1042) & ~0x000F == 0 and stated.value & 0xF == 4
    assert trained.value ^ 0x0243 == 0x0020
    for bdf, content in space.spaces.items():
        changed = {i for i in range(256) if content[i] != before[bdf][i]}
        # Link Status is the hardware's; the low byte of Link Control 2 holds the target.
        own = {LINK_CONTROL_2} if bdf == plan.port else set()
        assert changed <= own | {LINK_STATUS, LINK_STATUS + 1}, str(bdf)


def test_the_platforms_ceiling_is_the_target_and_every_register_is_logged(
    space: SimulatedConfig,
) -> None:
    plan, result = carried_out(space)
    assert (plan.target_gt_per_s, result.registers.current_code) == (16.0, 4)
    text = "\n".join(result.log)
    assert "Link Control 2: 0x1042 -> 0x1044" in text
    assert "Link Control: 0x0243 -> 0x0263" in text
    assert "then 0x0243; Link Status 0x3102 -> 0x3104: 16 GT/s x16" in text


def test_a_plan_alone_writes_nothing_and_shows_masks(space: SimulatedConfig) -> None:
    text = "\n".join(describe(planned(space.host, space)))
    assert space.writes == []
    assert "mask 0x000f" in text and "mask 0x0020" in text
    assert "0x1042 -> 0x1044" in text and "0x0243 -> 0x0263" in text
    low = structs.replace(read_registers(space, planned(space.host, space).port), control_2=0x1041)
    (line, *_) = describe(replace(planned(space.host, space), before=low))
    assert line.endswith("link at 5.0 GT/s x16, port set to train to 2.5 GT/s")
    silent = structs.replace(low, capabilities=low.capabilities & ~(1 << 20), status=0)
    assert silent.is_up  # it does not report whether the link carries data
    narrow = describe(replace(planned(space.host, space), expected_width=8))
    assert narrow[-1].startswith("expected: 16 GT/s x8; ")
    assert f"would write only to port {planned(space.host, space).port}:" in text


def test_a_link_at_its_speed_is_left_alone(space: SimulatedConfig) -> None:
    carried_out(space)
    space.accesses.clear()
    plan, result = carried_out(space)
    assert not plan.is_needed and space.writes == [] and result.log == ()


def test_a_fast_link_with_a_low_target_gets_the_target_and_no_training(
    space: SimulatedConfig,
) -> None:
    plan, _ = carried_out(space)
    space.spaces[plan.port][LINK_CONTROL_2] = 0x42
    space.accesses.clear()
    journal = MemoryJournal()
    _, result = carried_out(space, journal)
    assert [(a.offset, a.value & 0xFF) for a in space.writes] == [(LINK_CONTROL_2, 0x44)]
    assert result.findings == () and journal.open_entry is None


@pytest.mark.parametrize("target", [5, 6])
def test_no_target_above_either_end(target: int, space: SimulatedConfig) -> None:
    space.spaces[GPU][AT + 0x2C] = 0x3E
    with pytest.raises(InputError, match=r"both ends.* port can 16 GT/s and the device 32 GT/s"):
        planned(space.host, space, target)
    space.spaces[GPU][AT + 0x2C] = 0x06
    with pytest.raises(InputError, match=r"the device 5 GT/s\n  hint: --target 2 "):
        planned(space.host, space, target)
    assert space.writes == []


@pytest.mark.parametrize("target", [0, 7, -1])
def test_a_target_that_is_no_generation_is_refused(target: int, space: SimulatedConfig) -> None:
    with pytest.raises(UsageError, match="1 to 6"):
        planned(space.host, space, target)


def test_a_device_of_version_1_has_a_speed_and_needs_no_target(space: SimulatedConfig) -> None:
    before = planned(space.host, space)
    space.spaces[GPU][AT + 2] = 0x41
    assert planned(space.host, space).target_code == before.target_code
    space.spaces[before.port][AT + 0x2C] = 0  # no list: every speed up to the fastest
    assert planned(space.host, space).target_code == before.target_code
    reads = {access.offset for access in space.accesses[-20:] if access.bdf == GPU}
    assert LINK_CONTROL_2 not in reads
    space.spaces[before.port][AT + 0x0C] &= 0xF0
    assert read_registers(space, before.port).speeds == (1,)


def test_a_capability_list_in_a_circle_ends(space: SimulatedConfig) -> None:
    port = planned(space.host, space).port
    space.spaces[port][0x81] = 0x80
    with pytest.raises(HostError, match="no PCI Express capability"):
        planned(space.host, space)


@pytest.mark.parametrize("trains", ["reaches", "trains_narrow"])
def test_a_link_that_stays_slow_or_narrow_gets_back_the_target_that_was_found(
    trains: str, space: SimulatedConfig
) -> None:
    port = planned(space.host, space).port
    getattr(space, trains)[port] = {"reaches": 2, "trains_narrow": 8}[trains]
    journal = MemoryJournal()
    width = {"reaches": 4, "trains_narrow": 12}[trains]
    plan = replace(planned(space.host, space), expected_width=width)
    (finding,) = retrained(plan, space, journal).findings
    assert (finding.id, finding.severity) == ("retrain-failed", Severity.CRITICAL)
    assert finding.expected == f"16 GT/s x{width} after training"
    assert finding.observed.startswith(
        {"reaches": "5 GT/s x16;", "trains_narrow": "16 GT/s x8;"}[trains]
    )
    back = {"reaches": "5 GT/s x16", "trains_narrow": "5 GT/s x8"}[trains]
    assert finding.observed.endswith(f" is back: {back}")
    assert space.read(port, LINK_CONTROL_2, 2) == 0x1042
    assert journal.open_entry is None


def test_a_link_that_is_lost_is_brought_back_at_the_old_target(space: SimulatedConfig) -> None:
    port = planned(space.host, space).port
    space.loses_link.add(port)
    _, result = carried_out(space)
    (finding,) = result.findings
    assert "no link" in finding.observed and "NO LINK" not in finding.observed
    assert read_registers(space, port).is_up and read_registers(space, port).target_code == 2


@pytest.mark.parametrize("cut_at", [1, 2])
@pytest.mark.parametrize("cut_after_write", [False, True])
def test_an_interruption_is_explained_and_resumed(cut_at: int, cut_after_write: bool) -> None:
    space = SimulatedConfig(sick(), cut_at=cut_at, cut_after_write=cut_after_write)
    journal = MemoryJournal()
    with pytest.raises(PowerCutError):
        carried_out(space, journal)
    space.cut_at = None
    plan = planned(space.host, space)
    entry = journal.open_entry
    assert entry is not None and (entry.before, entry.after) == ("0x1042", "4")
    explained = explain_interrupted(entry, plan.before)
    said = explained.observed
    assert explained.subject == f"{GPU} below port {plan.port}"
    assert explained.expected.endswith(": target 16 GT/s, Link Control 2 found as 0x1042")
    untouched = cut_at == 1 and not cut_after_write
    assert ("nothing had been written" in said) is untouched
    assert ("new target was written" in said) is not untouched
    result = retrained(plan, space, journal)
    assert (
        result.registers.current_code == 4 and result.findings == () and journal.open_entry is None
    )


def test_somebody_elses_target_after_an_interruption_is_said(space: SimulatedConfig) -> None:
    plan = planned(space.host, space)
    lines: list[ChangeEntry] = []
    RetrainStep(plan, space, wait=no_wait).do(lines.append)
    entry = structs.replace(lines[0], before="0x1043")
    plan = structs.replace(plan, before=replace(plan.before, control_2=0x1041, status=0))
    explained = explain_interrupted(entry, plan.before).observed
    assert "another program" in explained and explained.startswith(
        "Link Control 2 0x1041, link at speed code 0 x0: "
    )
    entry = structs.replace(lines[0], before="0x1044")  # a slow link that had the target already
    before = structs.replace(plan.before, control_2=0x1044)
    assert "nothing had been written" in explain_interrupted(entry, before).observed


def test_a_journal_on_disk_keeps_what_was_found_and_refuses_rubbish(tmp_path: Path) -> None:
    space, directory = SimulatedConfig(sick(), cut_at=2), str(tmp_path / "retrain")
    plan = planned(space.host, space)
    journal = retrain_journal(plan.port, directory)
    assert open_retrain(journal) is None
    with pytest.raises(PowerCutError):
        RetrainStep(plan, space, wait=no_wait).do(journal.write)
    (tmp_path / "retrain" / "note").touch()
    (kept,) = retrain_journals(directory)
    entry = open_retrain(kept)
    assert entry is not None and (entry.subject, entry.before) == (str(plan.port), "0x1042")
    registers = "CAP_EXP+30.w=0002:000f CAP_EXP+10.w=0020:0020"
    assert entry.by_hand == f"setpci -s {plan.port} {registers}"
    space.cut_at = None
    RetrainStep(planned(space.host, space), space, entry, no_wait).do(journal.write)
    assert open_retrain(kept) is None
    assert kept.to_undo() == (entry.with_state(ChangeState.DONE),)
    journal.files.journal_path.write_text("{}\n")
    with pytest.raises(InputError, match=r"journal\.jsonl") as refused:
        open_retrain(journal)
    assert "setpci" in (refused.value.hint or "")


def test_a_gpu_behind_a_switch_of_its_own_is_trained_at_the_slot() -> None:
    text = arc().replace("Speed 16GT/s (ok)", "Speed 8GT/s (downgraded)")
    host = host_from_lspci(text, "arc")
    space = SimulatedConfig(host)
    plan = planned(host, space, device=Bdf.parse("03:00.0"))
    assert (plan.port, plan.device) == (Bdf.parse("00:01.0"), Bdf.parse("01:00.0"))
    behind = {device.bdf for device in list_functions_behind(host, plan.port)}
    assert behind == {Bdf.parse("01:00.0"), Bdf.parse("02:01.0"), Bdf.parse("03:00.0")}
    below_switch = changed(shipped("hgx-h100"), is_gpu, driver="vfio-pci")
    (gpu,) = gpus("hgx-h100", 1)
    device = below_switch.find_device(gpu)
    plan = planned(below_switch, SimulatedConfig(below_switch), device=gpu)
    assert device is not None and (plan.device, plan.port) == (gpu, device.parent)


def refuse(path: Path) -> Iterator[Path]:
    raise PermissionError


def test_processes_that_hold_a_group_are_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def process(pid: int, name: str, *files: str) -> None:
        directory = tmp_path / str(pid) / "fd"
        directory.mkdir(parents=True)
        (tmp_path / str(pid) / "comm").write_text(f"{name}\n")
        for number, file in enumerate(files):
            (directory / str(number)).symlink_to(file)

    (tmp_path / "self" / "ns").mkdir(parents=True)
    (tmp_path / "self" / "ns" / "pid").symlink_to("pid:[4026531836]")
    process(1, "init", "/dev/null")
    process(4711, "qemu-system-x86", "/dev/vfio/vfio", "/dev/vfio/77", "socket:[1]")
    device = shipped(SICK).device_at[GPU]

    def holders(of: PciDevice) -> tuple[str, ...] | None:
        return find_holders([of], proc=str(tmp_path), sys=str(tmp_path))[of.bdf]

    assert holders(replace(device, iommu_group=77)) == ("qemu-system-x86 (process 4711)",)
    assert holders(replace(device, iommu_group=7)) == ()
    (tmp_path / "bus/pci/devices" / str(GPU) / "vfio-dev" / "vfio3").mkdir(parents=True)
    process(4712, "qemu-kvm", "/dev/vfio/devices/vfio3")
    assert holders(device) == ("qemu-kvm (process 4712)",)
    process(4713, "qemu-old", "/dev/vfio/noiommu-8")
    assert "qemu-old (process 4713)" in (holders(replace(device, iommu_group=8)) or ())
    process(4714, "qemu\x1b[31m", "/dev/vfio/9")
    assert "qemu?[31m (process 4714)" in (holders(replace(device, iommu_group=9)) or ())
    process(4715, "", "/dev/vfio/10")
    (tmp_path / "4715" / "fd" / "closed").touch()
    (tmp_path / "4716").mkdir()  # both ended meanwhile
    assert holders(replace(device, iommu_group=10)) == (
        "? (process 4715)",
        "qemu-kvm (process 4712)",
    )
    # Of one that VFIO has and whose files are not known nothing is known.
    unknown = replace(device, bdf=AUDIO_LIKE, iommu_group=None, driver="vfio-pci")
    assert holders(unknown) is None
    with monkeypatch.context() as hidden:
        listed = Path.iterdir
        hidden.setattr(Path, "iterdir", lambda p: (refuse if p.name == "fd" else listed)(p))
        assert holders(device) is None
    with monkeypatch.context() as hidden:
        read = Path.readlink
        hidden.setattr(Path, "readlink", lambda p: (refuse if p.parent.name == "fd" else read)(p))
        assert holders(device) is None
    # In a container the host's processes are out of sight.
    (tmp_path / "self" / "ns" / "pid").unlink()
    (tmp_path / "self" / "ns" / "pid").symlink_to("pid:[4026532000]")
    assert holders(device) is None


def test_a_lower_target_brings_a_fast_link_down(space: SimulatedConfig) -> None:
    """A riser that fails at Gen4 is run at Gen3 on purpose."""
    carried_out(space)
    plan = planned(space.host, space, 3)
    assert plan.is_needed
    result = retrained(plan, space)
    assert (result.findings, result.registers.current_code) == ((), 3)
    assert not planned(space.host, space, 3).is_needed
    space.spaces[plan.port][LINK_CONTROL_2] = 0x44  # its next training would raise it
    assert planned(space.host, space, 3).is_needed


def test_a_link_that_climbs_one_generation_a_training_gets_there() -> None:
    space = SimulatedConfig(sick(), climbs=True)
    for bdf in (planned(space.host, space).port, GPU):
        space.spaces[bdf][AT + 0x0C] |= 5
        space.spaces[bdf][AT + 0x2C] = 0x3E
        space.spaces[bdf][LINK_STATUS] = 0x01
    _, result = carried_out(space)
    assert (result.findings, result.registers.current_code) == ((), 5)


def test_a_link_that_gains_nothing_is_trained_once_and_once_to_go_back() -> None:
    space = SimulatedConfig(sick())
    port = planned(space.host, space).port
    space.reaches[port] = read_registers(space, port).current_code
    carried_out(space)
    assert sum(write.offset == LINK_CONTROL for write in space.writes) == 2


def test_the_fastest_and_widest_link_is_read(space: SimulatedConfig) -> None:
    space.spaces[GPU][AT + 0x2C] = 0x7E
    space.spaces[GPU][LINK_STATUS : LINK_STATUS + 2] = bytes((0x06, 0x02))
    registers = read_registers(space, GPU)
    assert (registers.max_code, registers.current_code, registers.current_width) == (6, 6, 32)


def test_a_training_that_takes_most_of_a_second_is_waited_for(space: SimulatedConfig) -> None:
    plan, waited = planned(space.host, space), 0.0

    def wait(seconds: float) -> None:
        nonlocal waited
        waited += seconds
        bits = (
            0x08 if waited < 0.9 else 0x20 if waited > 0.95 else 0
        )  # trains, then has no link yet
        status = space.spaces[plan.port]
        status[LINK_STATUS + 1] = status[LINK_STATUS + 1] & ~0x28 | bits

    step = RetrainStep(plan, space, wait=wait)
    step.do(lambda entry: None)
    assert step.result.findings == ()
    space.spaces[GPU], waited = SimulatedConfig(sick()).spaces[GPU], -1000.0
    space.spaces[plan.port] = SimulatedConfig(sick()).spaces[plan.port]
    endless = RetrainStep(plan, space, wait=wait)
    endless.do(lambda entry: None)
    (failure,) = endless.result.findings
    assert failure.id == "retrain-failed" and "NO LINK" in failure.observed
    assert (failure.fix or "").startswith("remove and rescan the device")


@pytest.mark.parametrize("cut_at", [1, 2, 3, 4])
@pytest.mark.parametrize("cut_after_write", [False, True])
def test_an_interrupted_failure_ends_with_the_target_that_was_found(
    cut_at: int, cut_after_write: bool
) -> None:
    """The link cannot come up, and the run is cut at each of its writes."""
    space = SimulatedConfig(sick(), cut_at=cut_at, cut_after_write=cut_after_write)
    port = planned(space.host, SimulatedConfig(space.host)).port
    space.reaches[port] = 2
    journal = MemoryJournal()
    with pytest.raises(PowerCutError):
        carried_out(space, journal)
    space.cut_at = None
    plan = planned(space.host, space)
    entry = journal.open_entry
    assert entry is not None and explain_interrupted(entry, plan.before).observed
    result = retrained(plan, space, journal)
    assert [finding.id for finding in result.findings] == ["retrain-failed"]
    assert space.read(port, LINK_CONTROL_2, 2) == 0x1042 and journal.open_entry is None


RUNNING = pinned_domain("", name="gpu-vm", devices=(str(GPU),))
AUDIO = Bdf(GPU.domain, GPU.bus, GPU.device, 1)
USES: dict[str, tuple[Host, dict[Bdf, tuple[str, ...] | None], str]] = {
    "a running domain": (
        replace(sick(), domains=(replace(RUNNING, devices=()), RUNNING)),
        {},
        "running domain 'gpu-vm'",
    ),
    "a driver of the card's audio": (
        changed(sick(), lambda device: device.bdf == AUDIO, driver="snd_hda_intel"),
        {},
        str(AUDIO),
    ),
    "an open VFIO group": (sick(), {AUDIO: ("qemu-system-x86 (process 4711)",)}, "process 4711"),
    "a group that nobody here can see": (sick(), {GPU: None}, "as root"),
    **{
        driver: (sick(driver=driver), {}, f"driver {driver}")
        for driver in ("nvidia", "nouveau", "amdgpu", "snd_hda_intel", "xe")
    },
}
"""What uses a function behind the port: the host, processes with an open group, the refusal."""


@pytest.mark.parametrize("name", USES)
def test_whatever_uses_a_function_behind_the_port_refuses(name: str) -> None:
    host, uses, refusal = USES[name]
    space = SimulatedConfig(host)
    with pytest.raises(RetrainError, match=refusal) as refused:
        planned(host, space, uses={**unused(host), **uses})
    assert refused.value.exit_code == 3
    assert space.accesses == []


def test_who_cannot_see_who_has_the_group_is_refused() -> None:
    host = sick()
    with pytest.raises(RetrainError, match="check as root"):
        planned(host, SimulatedConfig(host), uses={})
    free = sick(driver=None)
    assert planned(free, SimulatedConfig(free), uses={}).is_needed, "VFIO has none of them"


def test_a_domain_that_is_shut_off_does_not_refuse() -> None:
    host = replace(sick(), domains=(replace(RUNNING, running=False),))
    assert planned(host, SimulatedConfig(host)).is_needed


@pytest.mark.parametrize(
    ("at", "bits", "words"),
    [(LINK_CONTROL, 0x10, "disabled .*0x0253"), (LINK_STATUS + 1, 0x08, "training .*0x3902")],
)
def test_a_port_in_another_state_refuses(at: int, bits: int, words: str) -> None:
    space = SimulatedConfig(sick())
    port = planned(space.host, space).port
    space.spaces[port][at] |= bits
    with pytest.raises(RetrainError, match=words):
        planned(space.host, space)
    assert space.writes == []


def test_a_port_without_a_link_refuses() -> None:
    space = SimulatedConfig(sick())
    port = planned(space.host, space).port
    space.spaces[port][LINK_STATUS + 1] &= ~0x20
    with pytest.raises(RetrainError, match="no link") as refused:
        planned(space.host, space)
    assert f"lspci -vvs {port}" in (refused.value.hint or "")  # there is no VM to shut down


def test_ports_virtual_functions_and_unknown_addresses_are_no_devices() -> None:
    host = sick()
    space = SimulatedConfig(host)
    port = planned(host, space).port
    with pytest.raises(InputError, match="found the port above it") as error:
        planned(host, space, device=port)
    assert str(GPU) in (error.value.hint or "")
    alone = tuple(device for device in host.pci_devices if device.parent != port)
    with pytest.raises(InputError, match="hint: nothing is below it"):
        planned(replace(host, pci_devices=alone), space, device=port)
    switch = host_from_lspci(arc(), "arc")
    with pytest.raises(InputError, match="found the port above it"):
        planned(switch, SimulatedConfig(switch), device=Bdf.parse("02:01.0"))
    with pytest.raises(InputError, match="no such PCI function"):
        planned(host, space, device=Bdf.parse("ff:1f.7"))
    integrated = (replace(d, parent=None) if d.bdf == GPU else d for d in host.pci_devices)
    with pytest.raises(InputError, match="root complex"):
        planned(replace(host, pci_devices=tuple(integrated)), space)
    sriov = shipped("x86-2p2n8c16t-sriov-nic")
    virtual = next(d for d in sriov.pci_devices if d.physical_function is not None)
    with pytest.raises(InputError, match=f"virtual one\n.*{virtual.physical_function}"):
        planned(sriov, SimulatedConfig(sriov), device=virtual.bdf)


def test_functions_without_a_target_register_are_refused() -> None:
    space = SimulatedConfig(sick())
    port = planned(space.host, space).port
    space.spaces[port][AT + 2] = 0x41
    with pytest.raises(HostError, match="version 1"):
        planned(space.host, space)
    for identity in (b"\xff" * 4, bytes(4)):
        space.spaces[port][0:4] = identity
        with pytest.raises(HostError, match="no answer"):
            planned(space.host, space)
    space.spaces[port][0:4] = b"\x86\x80\x2a\x35"
    for at in (0x06, 0x34):  # no list, and an empty one
        space.spaces[port][at], kept = 0, space.spaces[port][at]
        with pytest.raises(HostError, match="no PCI Express capability"):
            planned(space.host, space)
        space.spaces[port][at] = kept
