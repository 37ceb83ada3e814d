"""The way of peer requests against the PCIe specification's own rules, for every setting."""

from itertools import product

import pytest

from homenode.bdf import Bdf
from homenode.check.doctor.diagnosis import check_peers
from homenode.findings import Severity
from homenode.machine.discover.host import discover
from homenode.machine.discover.lspci import host_from_lspci
from homenode.machine.pci import DeviceKind
from homenode.machine.peer_route import PeerRoute, RouteWay, list_peer_routes
from homenode.machine.snapshot.protocol import BoundedSnapshot, MemorySnapshot
from homenode.machine.topology import Host
from tests.cpu_time import cpu_time_below
from tests.doctor_cases import changed

CONTROLS = ("ReqRedir", "CmpltRedir", "UpstreamFwd", "EgressCtrl", "DirectTrans", "TransBlk")

EGRESS_AND_REDIRECT = {
    # egress control, request redirect, the peer's bit of the vector -> handling
    (0, 0, 0): "direct",
    (0, 0, 1): "direct",
    (0, 1, 0): "up",
    (0, 1, 1): "up",
    (1, 0, 0): "direct",
    (1, 0, 1): "violation",
    (1, 1, 0): "direct",
    (1, 1, 1): "up",
}
"""PCIe 6.0, 6.12.3, the table of ACS P2P request redirect and egress control interactions."""

WAYS = {"direct": RouteWay.SWITCH, "up": RouteWay.ROOT, "violation": RouteWay.BLOCKED}


def by_the_specification(on: set[str], at: str, *, in_window: bool, bit: int) -> str:
    """6.12.1.1 and 6.12.3, sentence by sentence. at: the address type field, "00" or "10"."""
    if at == "10" and "TransBlk" in on:
        return "violation"  # Translation Blocking: AT is not the default
    if not in_window:
        return "up"  # no peer decodes the address: routed towards the root complex
    if at == "10" and "DirectTrans" in on:
        return "direct"  # "regardless of" request redirect and egress control
    return EGRESS_AND_REDIRECT["EgressCtrl" in on, "ReqRedir" in on, bit]


def lspci(on: set[str], *, ats: bool, relaxed: bool, driver: str) -> str:
    """A root port, a switch with two ports, a NIC and a GPU, as lspci -vvv prints them to root."""

    def control(sizes: str = "MaxPayload 256 bytes, MaxReadReq 512 bytes", sign: str = "+") -> str:
        return f"\t\tDevCtl:\tCorrErr- NonFatalErr+\n\t\t\tRlxdOrd{sign} ExtTag+\n\t\t\t{sizes}\n"

    def port(address: str, name: str, kind: str, buses: str, acs: str) -> str:
        return (
            f"{address} PCI bridge [0604]: {name}\n\tBus: primary=00, {buses}\n"
            f"\tCapabilities: [40] Express (v2) {kind}, MSI 00\n{control()}"
            f"\t\tLnkCap:\tPort #0, Speed 32GT/s, Width x16\n{acs}"
        )

    flags = " ".join(f"{name}{'+' if name in on else '-'}" for name in ("SrcValid", *CONTROLS))
    acs = f"\t\tACSCtl:\t{flags}\n"
    chip, vendor = "Broadcom Device [1000:c030]", "Intel Corporation Device [8086:352a]"
    driver_line = f"\tKernel driver in use: {driver}\n"
    nic_driver = driver.replace("nvidia", "mlx5_core")
    end = "\tCapabilities: [60] Express (v2) Endpoint, MSI 00\n"
    link = "\t\tLnkCap:\tPort #0, Speed 32GT/s, Width x16\n"
    sign = "+" if relaxed else "-"
    return "\n".join(
        (
            port("00:01.0", vendor, "Root Port (Slot+)", "secondary=01, subordinate=05", acs),
            port("01:00.0", chip, "Upstream Port", "secondary=02, subordinate=05", ""),
            port("02:00.0", chip, "Downstream Port (Slot+)", "secondary=03, subordinate=03", acs),
            port("02:01.0", chip, "Downstream Port (Slot+)", "secondary=04, subordinate=04", acs),
            "03:00.0 Infiniband controller [0207]: Mellanox Technologies ConnectX-7 [15b3:1021]\n"
            f"{end}{control(sign=sign)}{link}"
            f"\t\tATSCtl:\tEnable{'+' if ats else '-'}, Smallest Translation Unit: 00\n"
            f"\tKernel driver in use: {nic_driver}\n",
            "04:00.0 3D controller [0302]: NVIDIA Corporation GH100 [10de:2330]\n"
            f"{end}{control()}{link}{driver_line}",
        )
    )


def made(on: set[str], *, ats: bool = False, relaxed: bool = False, vm: bool = True) -> Host:
    driver = "vfio-pci" if vm else "nvidia"
    return host_from_lspci(lspci(on, ats=ats, relaxed=relaxed, driver=driver), "posted")


def route_of(host: Host) -> PeerRoute:
    (route,) = (one for one in list_peer_routes(host) if str(one.requester.bdf) == "0000:03:00.0")
    return route


COMBINATIONS = [
    ({name for name, flag in zip(CONTROLS, flags, strict=True) if flag}, ats, relaxed, vm)
    for flags in product((False, True), repeat=len(CONTROLS))
    for ats, relaxed, vm in product((False, True), repeat=3)
]


@pytest.mark.parametrize("vm", [False, True])
def test_every_setting_has_the_way_that_the_specification_gives_it(vm: bool) -> None:
    ours = [one for one in COMBINATIONS if one[3] is vm]
    assert len(ours) == 2**8
    for on, ats, relaxed, _ in ours:
        route = route_of(made(on, ats=ats, relaxed=relaxed, vm=vm))
        # A VM's own addresses are in no window of the host's switch; translated and bare ones are.
        in_window, at = ats or not vm, "10" if ats else "00"
        handled = {by_the_specification(on, at, in_window=in_window, bit=bit) for bit in (0, 1)}
        goes_up_to_root_port = handled == {"up"} and in_window
        if len(handled) > 1 or (goes_up_to_root_port and on and "UpstreamFwd" not in on):
            expected = RouteWay.UNKNOWN
        else:
            expected = WAYS[handled.pop()]
        assert route.write.way is expected, (on, ats, vm)
        # Completion redirect has no exception but the relaxed ordering attribute.
        redirected = "CmpltRedir" in on and not relaxed
        assert route.completion.way is (RouteWay.ROOT if redirected else RouteWay.SWITCH), (
            on,
            relaxed,
        )


REDIRECTS = {"ReqRedir", "CmpltRedir", "UpstreamFwd"}


def test_direct_trans_and_ats_and_relaxed_ordering_make_a_redirect_harmless() -> None:
    def cases(on: set[str], ats: bool, relaxed: bool) -> list[str]:
        found = check_peers(made(on, ats=ats, relaxed=relaxed))
        return [one.fix or "" for one in found if one.id == "p2p-redirected"]

    both = REDIRECTS | {"DirectTrans"}
    assert cases(both, ats=True, relaxed=True) == []
    (completions,) = cases(both, ats=True, relaxed=False)
    assert "NCCL_IB_PCI_RELAXED_ORDERING" in completions and "ATS" not in completions
    (without_ats,) = cases(both, ats=False, relaxed=True)
    assert "ATS_ENABLED" in without_ats and "ECAP_ACS" not in without_ats
    (without_direct,) = cases(REDIRECTS, ats=True, relaxed=True)
    assert "ECAP_ACS" in without_direct and "ATS_ENABLED" not in without_direct
    (neither,) = cases(REDIRECTS, ats=False, relaxed=True)
    assert "ECAP_ACS" in neither and "ATS_ENABLED" in neither


def test_the_meaning_stands_before_the_addresses_and_the_rate_is_given() -> None:
    (found,) = check_peers(made(REDIRECTS, ats=True))
    assert found.severity is Severity.WARNING
    assert "DirectTrans is off" in found.observed.split("0000:")[0]
    assert "32.4 GB/s of 57.6 GB/s" in found.observed


def test_a_bare_host_gains_by_clearing_redirects_and_needs_no_ats() -> None:
    (found,) = check_peers(made(REDIRECTS, vm=False))
    assert found.severity is Severity.WARNING and "0000:000c" in (found.fix or "")
    assert list(check_peers(made({"TransBlk"}, vm=False))) == []


def with_virtual_function(
    on: set[str], *, vendor: str = "15b3:101e", physical: tuple[bool, bool], own: tuple[bool, bool]
) -> Host:
    """A second NIC below the first port whose virtual function a VM has. Each pair: ATS, RO."""
    sign = {True: "+", False: "-"}
    whole = lspci(on, ats=physical[0], relaxed=physical[1], driver="vfio-pci")
    whole = whole.replace("Kernel driver in use: vfio-pci", "Kernel driver in use: mlx5_core", 1)
    virtual = (
        f"03:00.1 Infiniband controller [0207]: Mellanox Technologies Virtual Function [{vendor}]\n"
        "\tCapabilities: [60] Express (v2) Endpoint, MSI 00\n"
        f"\t\tDevCtl:\tCorrErr- NonFatalErr-\n\t\t\tRlxdOrd{sign[own[1]]} ExtTag+\n"
        "\t\t\tMaxPayload 128 bytes, MaxReadReq 128 bytes\n"
        f"\t\tATSCtl:\tEnable{sign[own[0]]}, Smallest Translation Unit: 00\n"
        "\tKernel driver in use: vfio-pci\n"
    )
    host = host_from_lspci(whole + "\n" + virtual, "made")
    function, owner = Bdf.parse("03:00.1"), Bdf.parse("03:00.0")
    return changed(host, lambda device: device.bdf == function, physical_function=owner)


def test_a_virtual_function_has_its_own_ats_and_the_relaxed_ordering_of_its_owner() -> None:
    """Every setting of ACS, and of both functions."""
    for bits in product((False, True), repeat=7):
        redirect, completions, direct, *settings = bits
        on = {"UpstreamFwd"} | ({"ReqRedir"} if redirect else set())
        on |= {"CmpltRedir"} if completions else set()
        on |= {"DirectTrans"} if direct else set()
        host = with_virtual_function(
            on, physical=(settings[0], settings[1]), own=(settings[2], settings[3])
        )
        (route,) = (r for r in list_peer_routes(host) if str(r.requester.bdf) == "0000:03:00.1")
        has_ats, is_relaxed = settings[2], settings[1]
        write = RouteWay.SWITCH if has_ats and (direct or not redirect) else RouteWay.ROOT
        back = RouteWay.SWITCH if is_relaxed or not completions else RouteWay.ROOT
        assert (route.write.way, route.completion.way) == (write, back), bits


def test_only_the_nics_of_mellanox_are_told_to_use_mlxconfig() -> None:
    pair = {"physical": (True, True), "own": (False, True)}
    for vendor, is_theirs in (("15b3:101e", True), ("14e4:1750", False)):
        host = with_virtual_function(REDIRECTS | {"DirectTrans"}, vendor=vendor, **pair)
        fixes = [
            one.fix or ""
            for one in check_peers(host)
            if one.id == "p2p-redirected" and "03:00.1" in one.subject
        ]
        assert [("mlxconfig -d 0000:03:00.0" in fix) is is_theirs for fix in fixes] == [True], fixes


def test_routes_of_thousands_of_functions_are_looked_for_below_one_root_port_each() -> None:
    files = {"/sys/devices/system/cpu/cpu0/topology/core_id": "0"}
    for number in range(4_000):
        directory = (
            f"/sys/bus/pci/devices/0000:{number >> 8:02x}:{number >> 3 & 31:02x}.{number & 7}"
        )
        files |= {f"{directory}/{name}": word for name, word in GPU_FILES.items()}
    with cpu_time_below(8):
        many = discover(BoundedSnapshot(MemorySnapshot("many", files)))
        assert len(many.devices_of_kind(DeviceKind.GPU)) == 4_000
        assert not list(check_peers(many))


GPU_FILES = {"class": "0x030200", "vendor": "0x10de", "device": "0x2330", "numa_node": "0"}
