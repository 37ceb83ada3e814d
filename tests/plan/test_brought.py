"""What a VM's GPUs bring along: the NIC next to each, and the NVSwitches of a whole board."""

import json
from pathlib import Path

import pytest
from lxml import etree
from msgspec import structs

from homenode.bdf import Bdf
from homenode.errors import UsageError
from homenode.machine.pci import DeviceKind, DeviceLink, LinkKind, PciLink
from homenode.machine.topology import Host
from homenode.plan.devices.brought import list_nvswitch_gpus
from homenode.plan.placement import Placement
from homenode.plan.request import GuestRequest, request_for
from homenode.plan.search.place import place
from homenode.vm.plan import Unplannable
from homenode.vm.plan_options import PlanOptions
from homenode.vm.sources import load_host
from homenode.vm.targets.registry import TARGETS
from tests.command_line import homenode
from tests.plan.test_many_gpus import HGX
from tests.small_hosts import DeviceSpec, asking, even_host, pinned_domain, small_request

NIC = DeviceKind.NIC
SWITCHES = [DeviceSpec(f"0000:{bus:02x}:00.0", 1, DeviceKind.NVSWITCH, root=9) for bus in (1, 2)]


def hgx(*more: DeviceSpec, **changes: object) -> Host:
    """Two GPUs on each of four switches, and more devices."""
    host = even_host(2, 1, 4, 8, 2, devices=[*HGX, *more])
    return structs.replace(host, **changes)


def nic(bus: int, root: int = 0, switch: int | None = 0, function: int = 0) -> DeviceSpec:
    return DeviceSpec(f"0000:{bus:02x}:00.{function}", root // 2, NIC, root, switch)


def wanting(count: int | None, **more: object) -> GuestRequest:
    return asking(small_request(8), gpu_count=count, **more)


def found(host: Host, request: GuestRequest) -> tuple[list[str], set[str]]:
    """Buses of the devices that are no GPUs of HGX, and ids of the findings."""
    placed = place(host, request)
    gpus = {Bdf.parse(spec.bdf) for spec in HGX}
    return [str(b)[5:] for b in placed.devices if b not in gpus], ids(placed)


def ids(placed: Placement) -> set[str]:
    return {finding.id for finding in placed.findings}


def with_driver(host: Host, drivers: dict[str, str]) -> Host:
    names = {Bdf.parse(text): name for text, name in drivers.items()}
    devices = (structs.replace(d, driver=names.get(d.bdf, d.driver)) for d in host.pci_devices)
    return structs.replace(host, pci_devices=tuple(devices))


def test_each_gpu_brings_the_nic_next_to_it_and_no_other() -> None:
    host = hgx(nic(0x1A), nic(0x3C), nic(0x9C, 2), nic(0x77, 7, None))
    assert found(host, wanting(2, with_nics=True))[0] == ["1a:00.0", "3c:00.0"]
    assert found(host, wanting(1, with_nics=True))[0] in (["1a:00.0"], ["9c:00.0"])
    assert found(host, wanting(2))[0] == []
    second = wanting(None, with_nics=True, devices=(Bdf.parse("3b:00.0"),))
    assert found(host, second)[0] == ["3c:00.0"]


def test_of_several_nics_the_fastest_is_brought() -> None:
    host = hgx(nic(0x1A), nic(0x1B), nic(0x1B, function=1))
    links = {"1a:00.0": PciLink(32.0, 4, 32.0, 4), "1b:00.1": PciLink(32.0, 16, 32.0, 16)}
    devices = (structs.replace(d, link=links.get(str(d.bdf)[5:])) for d in host.pci_devices)
    host = structs.replace(host, pci_devices=tuple(devices))
    one = wanting(None, with_nics=True, devices=(Bdf.parse("19:00.0"),))
    assert found(host, one)[0] == ["1b:00.1"]


def test_gpus_that_share_a_nic_bring_it_once() -> None:
    assert found(hgx(nic(0x1A)), wanting(2, with_nics=True)) == (["1a:00.0"], {"nic-bound-to-host"})


def test_gpus_whose_nic_is_free_are_chosen() -> None:
    host = hgx(nic(0x1A), nic(0x4D, 1), nic(0x9C, 2))
    busy = pinned_domain("0", name="other", devices=("1a:00.0",))
    request = asking(wanting(2, with_nics=True), vcpus=2)
    assert found(structs.replace(host, domains=(busy,)), request)[0] == ["4d:00.0"]


def test_a_gpu_that_brings_none_is_a_finding_with_who_has_it() -> None:
    busy = pinned_domain("0", name="other", devices=("1a:00.0",))
    host = hgx(nic(0x1A), domains=(busy,))
    placed = place(host, wanting(None, with_nics=True, devices=(Bdf.parse("19:00.0"),)))
    (finding,) = (f for f in placed.findings if f.id == "gpu-without-nic")
    assert finding.severity == "warning" and "1a:00.0 by 'other'" in finding.observed


def test_a_nic_serves_one_gpu_of_its_switch() -> None:
    gpus = (Bdf.parse("19:00.0"), Bdf.parse("3b:00.0"))
    request = wanting(None, with_nics=True, devices=gpus)
    assert found(hgx(nic(0x17), nic(0x1A)), request)[0] == ["17:00.0", "1a:00.0"]


def test_a_nic_that_the_document_has_serves_its_gpu() -> None:
    host = hgx(nic(0x1A), nic(0x1B))
    own = (Bdf.parse("19:00.0"), Bdf.parse("1b:00.0"))
    assert found(host, wanting(None, with_nics=True, devices=own))[0] == ["1b:00.0"]


def test_a_nic_with_virtual_functions_gives_its_first_free_one() -> None:
    host = hgx(*(nic(0x1A, function=number) for number in range(4)))
    parent = Bdf.parse("1a:00.0")
    host = structs.replace(
        host,
        pci_devices=tuple(
            structs.replace(d, physical_function=parent)
            if d.bdf.bus == parent.bus and d.bdf.function
            else d
            for d in host.pci_devices
        ),
    )
    request = wanting(None, with_nics=True, devices=(Bdf.parse("19:00.0"),))
    assert found(host, request)[0] == ["1a:00.1"]
    busy = pinned_domain("0", name="other", devices=("1a:00.1",))
    assert found(structs.replace(host, domains=(busy,)), request)[0] == ["1a:00.2"]


@pytest.mark.parametrize(
    ("driver", "severity"), [("mlx5_core", "warning"), ("vfio-pci", None), (None, None)]
)
def test_a_nic_that_the_host_uses_is_named(driver: str | None, severity: str | None) -> None:
    host = with_driver(hgx(nic(0x1A)), {"19:00.0": "nvidia"})
    if driver is not None:
        host = with_driver(host, {"1a:00.0": driver})
    placed = place(host, wanting(2, with_nics=True))
    said = [f for f in placed.findings if f.id == "nic-bound-to-host"]
    assert [f.severity for f in said] == ([] if severity is None else [severity])
    assert all("1a:00.0" in f.subject and "mlx5_core" in f.observed for f in said)


def test_where_no_driver_is_known_the_nics_are_named_as_well() -> None:
    placed = place(hgx(nic(0x1A)), wanting(2, with_nics=True))
    assert [f.severity for f in placed.findings if f.id == "nic-bound-to-host"] == ["info"]


def test_all_gpus_of_a_board_bring_its_nvswitches() -> None:
    host = hgx(*SWITCHES)
    assert found(host, wanting(8, with_nvswitches=True))[0] == ["01:00.0", "02:00.0"]
    assert "nvswitches-omitted" not in ids(place(host, wanting(8, with_nvswitches=True)))
    named = tuple(Bdf.parse(spec.bdf) for spec in HGX)
    rest = wanting(4, with_nvswitches=True, devices=named[:4])
    assert found(host, rest)[0] == ["01:00.0", "02:00.0"]
    assert found(host, wanting(None, with_nvswitches=True, devices=named))[0][0] == "01:00.0"


def test_all_gpus_without_the_nvswitches_are_warned() -> None:
    host = hgx(*SWITCHES)
    assert "nvswitches-omitted" in ids(place(host, wanting(8)))
    assert "nvswitches-omitted" not in ids(place(host, wanting(4)))
    assert "nvswitches-omitted" not in ids(place(hgx(), wanting(8)))
    for switches in (("01:00.0", "02:00.0"), ("02:00.0",)):
        service = pinned_domain("7", name="fm", devices=switches)
        shared = structs.replace(host, domains=(service,))
        assert "nvswitches-omitted" not in ids(place(shared, wanting(8)))


def refusal(host: Host, request: GuestRequest) -> str:
    with pytest.raises(Unplannable) as caught:
        place(host, request)
    assert [one.constraint for one in caught.value.rejections] == ["nvswitches"]
    return f"{caught.value.message} {caught.value.hint}"


def test_nvswitches_go_with_all_gpus_or_not_at_all() -> None:
    host = hgx(*SWITCHES)
    named = (Bdf.parse(HGX[0].bdf),)
    text = refusal(host, wanting(4, with_nvswitches=True, devices=named))
    assert "all 8 GPUs that they join, and this VM gets 5" in text
    assert "ConnectX" in refusal(hgx(), wanting(8, with_nvswitches=True))
    service = pinned_domain("7", name="fm", devices=("01:00.0",))
    shared = structs.replace(host, domains=(service,))
    assert "by 'fm'" in refusal(shared, wanting(8, with_nvswitches=True))
    other = pinned_domain("7", name="gpu-vm", devices=(HGX[0].bdf[5:],))
    shared = structs.replace(host, domains=(other,))
    assert "by 'gpu-vm'" in refusal(shared, wanting(7, with_nvswitches=True))


def test_a_board_is_what_its_links_join() -> None:
    """Two boards of four GPUs and a switch each: either is whole on its own."""
    host = hgx(*SWITCHES)
    gpus = [Bdf.parse(spec.bdf) for spec in HGX]
    switches = [Bdf.parse(spec.bdf) for spec in SWITCHES]
    links = tuple(
        DeviceLink(LinkKind.NVLINK, gpu, switches[number // 4]) for number, gpu in enumerate(gpus)
    )
    host = structs.replace(host, links=links)
    assert [len(one.gpus) for one in list_nvswitch_gpus(host)] == [4, 4]
    first = place(host, wanting(4, with_nvswitches=True))
    assert set(first.devices) in ({*gpus[:4], switches[0]}, {*gpus[4:], switches[1]})
    whole = place(host, wanting(8, with_nvswitches=True))
    assert set(whole.devices) == {*gpus, *switches}
    rest = place(host, wanting(2, with_nvswitches=True, devices=(gpus[0], gpus[1])))
    assert set(rest.devices) == {*gpus[:4], switches[0]}
    refusal(host, wanting(4, with_nvswitches=True, devices=(gpus[0],)))
    busy = pinned_domain("7", name="other", devices=(str(gpus[2])[5:],))
    second = structs.replace(host, domains=(busy,))
    assert set(place(second, wanting(4, with_nvswitches=True)).devices) == {*gpus[4:], switches[1]}


def test_a_card_of_another_model_is_no_part_of_the_board() -> None:
    host = hgx(*SWITCHES)
    last = Bdf.parse(HGX[-1].bdf)
    devices = (structs.replace(d, device_id=7) if d.bdf == last else d for d in host.pci_devices)
    (board,) = list_nvswitch_gpus(structs.replace(host, pci_devices=tuple(devices)))
    assert len(board.gpus) == 7 and last not in board.gpus


@pytest.mark.parametrize("wanted", ["with_nics", "with_nvswitches"])
def test_what_gpus_bring_needs_gpus(wanted: str) -> None:
    options = structs.replace(PlanOptions(layout="pin", vcpus=4), **{wanted: True})
    with pytest.raises(UsageError, match="requires GPUs"):
        request_for(small_request(4).guest, options, hgx())
    request_for(small_request(4).guest, structs.replace(options, gpu_count=1), hgx())


def test_parts_of_gpus_bring_no_nvswitches() -> None:
    options = PlanOptions(layout="pin", gpu_count=1, gpu_profile="A40-12Q", with_nvswitches=True)
    with pytest.raises(UsageError, match="cannot be used together"):
        request_for(small_request(4).guest, options, load_host("x86-2p2n8c8t-divided-gpus"))


# On the command line.


@pytest.mark.parametrize("target", ["libvirt", *TARGETS])
@pytest.mark.parametrize(
    ("words", "expected"),
    [("--gpus 2 --with-nics", [2, 2, 0]), ("--gpus 8 --with-nvswitches", [8, 0, 4])],
)
def test_what_gpus_bring_is_written_for_every_target(
    target: str, words: str, expected: list[int], tmp_path: Path
) -> None:
    path, saved = tmp_path / "vm", tmp_path / "plan.json"
    size = "--host hgx-h100 --layout pin-numa --vcpus 32 --memory 64GiB --quiet --target"
    written = (target, "-o", str(path), "--save-plan", str(saved))
    done = homenode("plan", *words.split(), *size.split(), *written)
    assert done.exit_code == 0, (done.output, done.exception)
    devices = [one["bdf"] for one in json.loads(saved.read_text())["vm"]["hostdevs"]]
    known = load_host("hgx-h100").device_at
    kinds = [known[Bdf.parse(bdf)].kind for bdf in devices]
    assert [kinds.count(kind) for kind in (DeviceKind.GPU, NIC, DeviceKind.NVSWITCH)] == expected
    text = path.read_text()
    if target == "libvirt":
        assert len(etree.fromstring(text).findall("devices/hostdev")) == sum(expected)
    else:
        assert all(bdf.removeprefix("0000:") in text for bdf in devices)


def test_a_gpu_is_named_by_its_number_of_show() -> None:
    words = "plan --name v --host hgx-h100 --vcpus 8 --memory 16GiB --json".split()
    by_number = homenode(*words, "--device", "gpu5", "--device", "gpu7")
    gpus = load_host("hgx-h100").devices_of_kind(DeviceKind.GPU)
    by_address = homenode(*words, "--device", str(gpus[5].bdf), "--device", str(gpus[7].bdf))
    assert json.loads(by_number.stdout)["vm"] == json.loads(by_address.stdout)["vm"]
    refused = homenode(*words, "--device", "gpu8")
    assert "the host has 8 GPUs" in str(refused.exception)


def test_a_plan_names_its_devices_that_are_no_gpus() -> None:
    """As a definition of another host may name them where it means GPUs."""
    words = "plan --name v --host hgx-h100 --vcpus 8 --memory 16GiB --device gpu0".split()
    plain = homenode(*words)
    drive = homenode(*words, "--device", "0000:18:00.0", "--device", "0000:3a:00.0")
    assert "devices " not in plain.stdout and "0000:18:00.0" not in plain.stdout
    assert "devices  NVMe drive 0000:18:00.0 and 0000:3a:00.0\n" in drive.stdout
