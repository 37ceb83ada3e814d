"""Parts of GPUs: what sysfs and the vendors' tools say of them comes to one list for each GPU."""

import json
from collections.abc import Mapping

import pytest
from msgspec.structs import replace

from homenode.bdf import Bdf
from homenode.errors import InputError, ParseError
from homenode.formats import decode, encode
from homenode.machine.description.parse import parse_description
from homenode.machine.discover.host import discover
from homenode.machine.pci import DeviceKind, GpuPart, PartKind, PciDevice
from homenode.machine.snapshot.gather import gather
from homenode.machine.snapshot.protocol import MemorySnapshot
from homenode.machine.snapshot.redact import Identities, redact
from homenode.machine.tools import amd_smi, nvidia_smi
from homenode.machine.topology import Host
from homenode.show.device_groups import DeviceCard, format_card_extras
from homenode.units import GIB
from homenode.vm.domain.read import read_running_domain
from tests.mutations import survives
from tests.rendered.machine import render
from tests.small_hosts import as_described

HOST = """
name = "parts"
packages = 2
cores_per_package = 4
memory_per_node = "64GiB"

[model.mig]
class = "gpu"
driver = "nvidia"
divided_by = "mig"
parts = ["3g.40gb", "1g.10gb+me"]

[model.vgpu]
class = "gpu"
driver = "nvidia"
total_vfs = 16
vfs = 3
vf_driver = "nvidia"
divided_by = "virtual-function"
parts = ["NVIDIA H200X-1-18C", "NVIDIA H200X-141C"]

[model.mdev]
class = "gpu"
driver = "nvidia"
total_vfs = 16
vfs = 4
divided_by = "mediated"
parts = ["NVIDIA A40-8Q", "NVIDIA A40-8Q"]

[model.t4]
class = "gpu"
driver = "nvidia"
divided_by = "mediated"
parts = ["GRID T4-4Q", "GRID T4-0B"]

[model.cpx]
class = "gpu"
vendor = 0x1002
device = 0x74a1
driver = "amdgpu"
divided_by = "partition"
parts = ["CPX"]
memory_mode = "NPS1"

[[root]]
node = [0, 1]
bus = [0x10, 0x80]
ports = ["mig", "vgpu", "mdev", "t4", { model = "cpx", memory_mode = "NPS4" }, "gpu"]
"""
T4 = ("00000000-1400-4000-8000-000000000000", "00000000-1400-4000-8000-000000000001")


def described() -> Host:
    return parse_description(HOST, "parts.toml").host


def gpus(host: Host) -> list[PciDevice]:
    found = host.devices_of_kind(DeviceKind.GPU)
    return [gpu for gpu in found if gpu.physical_function is None and gpu.node == 0]


def test_what_a_description_says_of_parts_is_found_again() -> None:
    found = discover(render(parse_description(HOST, "parts.toml")))
    mig, vgpu, mdev, t4, cpx, whole = gpus(found)
    assert [(p.profile, p.number) for p in mig.parts] == [("3g.40gb", 1), ("1g.10gb+me", 2)]
    assert [p.memory_bytes for p in mig.parts] == [40 * GIB, 10 * GIB]
    assert [p.memory_bytes for p in vgpu.parts] == [18 * GIB, 141 * GIB]
    assert len({p.bdf for p in mdev.parts}) == 2 and {p.bdf for p in t4.parts} == {t4.bdf}
    assert [p.memory_bytes for p in t4.parts] == [4 * GIB, GIB // 2]
    assert (cpx.partition_mode, cpx.memory_partition_mode, len(cpx.parts)) == ("CPX", "NPS4", 8)
    assert (whole.parts, whole.partition_mode, mig.partition_mode) == ((), None, "mig")
    assert [p.is_for_vms for gpu in (mig, mdev, cpx) for p in gpu.parts[:1]] == [False, True, False]
    assert as_described(found, described()) == described()
    text = encode("host", found)
    assert decode(text, "host", Host, "h") == found


def test_a_card_says_how_its_gpu_is_divided() -> None:
    extras = [format_card_extras(DeviceCard((gpu,))) for gpu in gpus(described())]
    assert extras == [
        ("MIG 1x 3g.40gb, 1x 1g.10gb+me",),
        ("3 of 16 VFs", "vGPU 1x NVIDIA H200X-1-18C, 1x NVIDIA H200X-141C"),
        ("4 of 16 VFs", "vGPU 2x NVIDIA A40-8Q"),
        ("vGPU 1x GRID T4-4Q, 1x GRID T4-0B",),
        ("partitions 8x CPX", "NPS4"),
        (),
    ]


def test_a_redacted_capture_keeps_which_vm_has_which_part_and_no_uuid() -> None:
    snapshot = render(parse_description(HOST, "parts.toml"))
    secret = T4[1].replace("00000000-1400", "5ec2e700-1400")
    domain = (
        "<domains><domain type='kvm' id='1'><name>a</name><memory>4194304</memory><vcpu>1</vcpu>"
        "<devices><hostdev mode='subsystem' type='mdev' model='vfio-pci'><source>"
        f"<address uuid='{secret.upper()}'/></source></hostdev></devices></domain></domains>"
    )
    renamed = changed(
        links={
            p.replace(T4[1], secret): t.replace(T4[1], secret) for p, t in snapshot.links.items()
        },
        commands={**snapshot.commands, "virsh-domains": domain},
    )
    gathered = gather(renamed)
    assert not gathered.unlike
    captured = redact(gathered.snapshot, Identities()).snapshot
    everything = f"{captured.files}{captured.links}{captured.commands}".lower()
    assert secret not in everything
    found = discover(captured, read_running_domain)
    (held,) = found.domains[0].mediated
    parts = gpus(found)[3].parts
    assert len(parts) == 2 and held in {part.uuid for part in parts}
    for ours, theirs in zip(gpus(found), gpus(described()), strict=True):
        assert [replace(p, uuid=None) for p in sorted(ours.parts, key=str)] == [
            replace(p, uuid=None) for p in sorted(theirs.parts, key=str)
        ] or ours.parts[0].kind is PartKind.MEDIATED


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        ('divided_by = "mig"', 'divided_by = "mgi"', "divided_by: Invalid enum value"),
        ('divided_by = "mig"', "", "parts: expected profiles and `divided_by`"),
        (
            'driver = "nvidia"\ndivided_by = "mig"',
            'driver = "vfio-pci"\ndivided_by = "mig"',
            "driver: expected 'nvidia'",
        ),
        ("vfs = 3", "vfs = 1", "parts: expected at most 1"),
        ('"mdev", "t4"', '{ model = "mdev", vfs = 1 }, "t4"', "parts: expected at most 1"),
        ('"vgpu", "mdev"', '{ model = "vgpu", vfs = 1 }, "mdev"', "parts: expected at most 1"),
        ("vendor = 0x1002", "vendor = 0x10de", "divided_by: expected what GPUs of its vendor can"),
        ('class = "gpu"', 'class = "nic"', "on a GPU"),
    ],
)
def test_a_division_that_no_gpu_has_is_refused(old: str, new: str, expected: str) -> None:
    with pytest.raises(InputError) as caught:
        parse_description(HOST.replace(old, new, 1), "parts.toml")
    assert expected in str(caught.value)


def changed(
    files: Mapping[str, str] | None = None,
    links: Mapping[str, str] | None = None,
    commands: Mapping[str, str] | None = None,
) -> MemorySnapshot:
    whole = render(parse_description(HOST, "parts.toml"))
    return MemorySnapshot(
        "h",
        files or whole.files,
        links or whole.links,
        commands or whole.commands,
        whole.directories,
    )


def without(*commands: str, **given: str) -> Host:
    snapshot = render(parse_description(HOST, "parts.toml"))
    kept = {n: t for n, t in snapshot.commands.items() if n not in commands}
    kept |= {name.replace("_", "-"): text for name, text in given.items()}
    return discover(changed(commands=kept))


def test_without_root_mig_instances_are_those_that_programs_can_use() -> None:
    listed = (
        "GPU 0: NVIDIA H100 (UUID: GPU-1)\n  MIG 1c.3g.40gb  Device  0: (UUID: MIG-a)\n"
        "  MIG 1g.10gb+me  Device  1: (UUID: MIG-b)\n"
    )
    mig = gpus(without("nvidia-smi-mig", nvidia_smi_list=listed))[0]
    parts = [(p.profile, p.uuid) for p in mig.parts]
    assert parts == [("3g.40gb", "MIG-a"), ("1g.10gb+me", "MIG-b")]
    mig = gpus(without("nvidia-smi-mig"))[0]
    assert [(p.profile, p.number) for p in mig.parts] == [(None, 1), (None, 2)]
    broken = without("nvidia-smi-mig", nvidia_smi_mig="| 0 MIG 1g.10gb x 1 0:1 |")
    assert any(gap.subject == "MIG instances" for gap in broken.gaps)


def test_amd_smi_counts_partitions_where_sysfs_gives_no_mode() -> None:
    rows = [
        {"gpu_id": 0, "memory": "NPS1", "accelerator_type": "DPX*", "partition_id": "0"},
        {"gpu_id": 1, "memory": "N/A", "accelerator_type": "N/A", "partition_id": "1"},
        {"gpu_id": 2, "memory": "NPS1", "accelerator_type": "CPX", "partition_id": "0,1,2"},
        {"gpu_id": 3, "memory": "NPS1", "accelerator_type": "N/A", "partition_id": "N/A"},
        {"gpu_id": 4, "memory": "NPS1", "accelerator_type": "SPX", "partition_id": "1"},
        {"gpu_id": 5, "memory": "NPS1", "accelerator_type": "SPX", "partition_id": 0},
    ]
    text = "WARNING: no root\n" + json.dumps({"current_partition": rows})
    parsed = [(p.number, p.compute, p.count) for p in amd_smi.parse_partitions(text)]
    assert parsed[:2] == [(0, "DPX", 2), (2, "CPX", 3)]
    assert parsed[2:] == [(3, None, 1), (4, "SPX", 1), (5, "SPX", 1)]
    topology = json.dumps([{"gpu": 0, "bdf": "0000:15:00.0"}, {"gpu": 8, "bdf": "0000:85:00.0"}])
    snapshot = render(parse_description(HOST, "parts.toml"))
    files = {p: t for p, t in snapshot.files.items() if not p.endswith("_partition")}
    text = json.dumps({"current_partition": rows[:2]})
    commands = {**snapshot.commands, "amd-smi-partition": text, "amd-smi-topology": topology}
    found = discover(changed(files=files, commands=commands))
    cpx = found.device_at[Bdf.parse("15:00.0")]
    assert (cpx.partition_mode, cpx.memory_partition_mode) == ("DPX", "NPS1")
    assert cpx.parts == tuple(GpuPart(PartKind.PARTITION, "DPX", number=n) for n in range(2))


def test_outputs_of_tools_that_are_cut_or_mixed_up_are_refused_or_read() -> None:
    instances = render(parse_description(HOST, "p")).command_output("nvidia-smi-mig") or ""
    parsed = [(i.profile, i.number) for i in nvidia_smi.parse_instances(instances)]
    assert parsed[:2] == [("3g.40gb", 1), ("1g.10gb+me", 2)]
    assert nvidia_smi.parse_instances("No GPU instances found: Not Found\n") == ()
    with pytest.raises(ParseError):
        nvidia_smi.parse_instances("|   0  MIG 1g.10gb   19   9   2:1 |\n" * 2)
    with pytest.raises(ParseError):
        nvidia_smi.parse_list("  MIG 1g.10gb Device 0: (UUID: MIG-a)\n")
    survives(nvidia_smi.parse_instances, instances)
    survives(nvidia_smi.parse_list, "GPU 0: A (UUID: GPU-1)\n  MIG 1g.5gb Device 0: (UUID: M)")
    survives(
        amd_smi.parse_partitions, '{"current_partition": [{"gpu_id": 0, "partition_id": "0"}]}'
    )


def test_a_mediated_device_that_leads_to_the_top_is_a_gap() -> None:
    snapshot = render(parse_description(HOST, "parts.toml"))
    path = f"/sys/bus/mdev/devices/{T4[1]}"
    found = discover(changed(links={**snapshot.links, path: "/"}))
    assert any(T4[1] in gap.subject for gap in found.gaps)
