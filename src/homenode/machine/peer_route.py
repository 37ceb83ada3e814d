"""PeerRoute: the route of requests from one PCIe function to another, and of their completions.

A receiving NIC writes into a GPU's memory; a sending NIC reads it, and the data returns as
completions. If the paths meet in a switch, its port decides: for requests by their address and ACS,
for completions by ACS and their relaxed ordering, which comes from the request.

Source: PCIe 6.0, 6.12.1.1 (ACS functions of downstream ports), 6.12.3 (ACS P2P request redirect and
egress control), 2.2.6.4 and 2.2.9 (relaxed ordering), 10.1.1 (address types of ATS).
"""

from collections.abc import Iterable, Iterator
from enum import IntEnum, StrEnum

from msgspec import Struct

from homenode.bdf import Bdf
from homenode.machine.link_path import Link, list_links_above
from homenode.machine.pci import DeviceKind, PciDevice, PciRegisters, PortType, is_emulated
from homenode.machine.topology import Host

REQUEST_REDIRECT = "ReqRedir"
COMPLETION_REDIRECT = "CmpltRedir"
UPSTREAM_FORWARDING = "UpstreamFwd"
EGRESS_CONTROL = "EgressCtrl"
DIRECT_TRANSLATED = "DirectTrans"
TRANSLATION_BLOCKING = "TransBlk"
DIRECT_TRANSLATED_BIT = 0x40
"""Of the ACS Control register. Source: PCIe 6.0, 7.7.11.3."""


class AddressType(StrEnum):
    """Type of a request's address for the switches on its route."""

    BUS = "untranslated, the target's own on the bus"
    IOVA = "untranslated, to be translated by the IOMMU"
    TRANSLATED = "translated by ATS"


class RouteWay(IntEnum):
    """Route of packets, best first."""

    SWITCH = 0  # through the switch that both are below
    ROOT = 1  # up to the root complex, and down again
    UNKNOWN = 2
    BLOCKED = 3  # an ACS violation: the request fails


class RouteCause(StrEnum):
    """Cause why packets leave their switch."""

    NONE = "nothing"
    NO_SWITCH = "no switch is above both"
    REDIRECT = "ACS redirects requests"
    NO_DIRECT_TRANSLATED = "ACS redirects translated requests as well"
    NOT_TRANSLATED = "the request has an address that only the IOMMU translates"
    EGRESS = "ACS egress control"
    TRANSLATION_BLOCKED = "ACS blocks translated requests"
    NOT_FORWARDED = "a port above does not forward redirected requests"
    COMPLETIONS = "ACS redirects completions without relaxed ordering"
    UNREAD = "not in the host's source"
    VIRTUAL = "a virtual port: ACS and ATS are the host's"


class RouteLeg(Struct, frozen=True):
    way: RouteWay
    cause: RouteCause = RouteCause.NONE
    at: Bdf | None = None  # the port that decides; None if no port does


def request_way(acs: frozenset[str], address: AddressType) -> tuple[RouteWay, RouteCause]:
    """Return the route of a memory request at the downstream port of a switch to a neighbouring
    function. acs: enabled flags in lspci's names. lspci does not print the egress control vector,
    so with egress control the route is unknown.

    >>> both = frozenset({"ReqRedir", "DirectTrans"})
    >>> [request_way(both, kind)[0].name for kind in (AddressType.TRANSLATED, AddressType.BUS)]
    ['SWITCH', 'ROOT']
    """
    if address is AddressType.TRANSLATED:
        if TRANSLATION_BLOCKING in acs:
            return RouteWay.BLOCKED, RouteCause.TRANSLATION_BLOCKED
        if DIRECT_TRANSLATED in acs:
            return RouteWay.SWITCH, RouteCause.NONE
    if address is AddressType.IOVA:  # in no window of the switch: the request always goes up
        return RouteWay.ROOT, RouteCause.NOT_TRANSLATED
    if EGRESS_CONTROL in acs:
        return RouteWay.UNKNOWN, RouteCause.EGRESS
    if REQUEST_REDIRECT in acs:
        translated = address is AddressType.TRANSLATED
        return RouteWay.ROOT, RouteCause.NO_DIRECT_TRANSLATED if translated else RouteCause.REDIRECT
    return RouteWay.SWITCH, RouteCause.NONE


def choose_completion_way(
    acs: frozenset[str], *, relaxed: bool | None
) -> tuple[RouteWay, RouteCause]:
    """Return the route of completions at the responding function's port. relaxed: their attribute.
    Other controls, including DirectTrans, do not matter."""
    if COMPLETION_REDIRECT not in acs or relaxed:
        return RouteWay.SWITCH, RouteCause.NONE
    return (RouteWay.UNKNOWN if relaxed is None else RouteWay.ROOT), RouteCause.COMPLETIONS


class PeerRoute(Struct, frozen=True, kw_only=True):
    requester: PciDevice
    target: PciDevice
    switch: Bdf | None  # the lowest that both are below, its upstream port
    addresses: tuple[AddressType, ...]  # those that the requests may have
    write: RouteLeg  # route of requests
    completion: RouteLeg  # route of the data that a read returns

    @property
    def read(self) -> RouteLeg:
        """The route of a read: the worse of the routes of its request and its data."""
        if self.write.way is RouteWay.SWITCH and self.completion.way is not RouteWay.SWITCH:
            return self.completion
        return self.write

    @property
    def is_direct(self) -> bool:
        return self.write.way is RouteWay.SWITCH and self.completion.way is RouteWay.SWITCH


def find_peer_route(
    host: Host, requester: PciDevice, target: PciDevice, *, in_vm: bool
) -> PeerRoute:
    """Return the route from a function to another. in_vm: both belong to a VM."""
    ports, target_ports = host.ports_above(requester), host.ports_above(target)
    above_target = {port.bdf for port in target_ports}
    switch = next((port for port in ports if port.bdf in above_target), None)
    if switch is not None and _find_port_type(switch) is not PortType.SWITCH_UPSTREAM:
        switch = None
    addresses = _list_address_types(requester, in_vm=in_vm)
    control = _find_control(host, requester)
    relaxed = None if control is None else control.relaxed_ordering
    write = completion = RouteLeg(RouteWay.ROOT, RouteCause.NO_SWITCH)
    emulated_port = next((port.bdf for port in (*ports, *target_ports) if is_emulated(port)), None)
    if emulated_port is not None:
        write = completion = RouteLeg(RouteWay.UNKNOWN, RouteCause.VIRTUAL, emulated_port)
    elif switch is not None:
        ingress = _port_below(ports, switch)
        upper_ports = ports[ports.index(switch) + 1 :]
        write = _write(ingress, upper_ports, addresses)
        completion = _route_completion(_port_below(target_ports, switch), relaxed)
    return PeerRoute(
        requester=requester,
        target=target,
        switch=None if switch is None else switch.bdf,
        addresses=addresses,
        write=write,
        completion=completion,
    )


def _find_control(host: Host, device: PciDevice) -> PciRegisters | None:
    """Return Device Control of a function; for a virtual function, whose own bits are reserved,
    that of its physical function. Source: PCIe 6.0, 9.3.5.4."""
    physical = device.physical_function
    if physical is None:
        return device.device_control
    return None if (owner := host.find_device(physical)) is None else owner.device_control


def is_passed(device: PciDevice) -> bool:
    """Return whether VFIO has a function."""
    return device.driver is not None and "vfio" in device.driver


def _find_port_type(port: PciDevice) -> PortType | None:
    return None if port.bridge is None else port.bridge.port_type


def _port_below(ports: tuple[PciDevice, ...], switch: PciDevice) -> PciDevice | None:
    at = ports.index(switch)
    return ports[at - 1] if at else None


def _list_address_types(requester: PciDevice, *, in_vm: bool) -> tuple[AddressType, ...]:
    """Return the address type. The function's own ATS counts: a virtual function has its own.
    Without ATS the IOMMU translates a VM's addresses, and the host's in a domain of type DMA."""
    ats = requester.ats_enabled
    if ats is None and requester.device_control is not None:
        ats = False  # its listing has capabilities, and ATS is not among them
    translates = in_vm or (requester.iommu_domain or "").startswith("DMA")
    plain = AddressType.IOVA if translates else AddressType.BUS
    if ats is None:
        return (plain, AddressType.TRANSLATED)
    return (AddressType.TRANSLATED,) if ats else (plain,)


def _find_acs(port: PciDevice) -> frozenset[str] | None:
    """Return the ACS flags; None if unknown; empty if a port is printed without ACS."""
    if port.acs is None:
        return None if port.device_control is None else frozenset()
    return frozenset(port.acs)


def _write(
    ingress: PciDevice | None, ports: tuple[PciDevice, ...], addresses: tuple[AddressType, ...]
) -> RouteLeg:
    acs = None if ingress is None else _find_acs(ingress)
    if ingress is None or acs is None:
        return RouteLeg(
            RouteWay.UNKNOWN, RouteCause.UNREAD, None if ingress is None else ingress.bdf
        )
    ways = [request_way(acs, address) for address in addresses]
    if len({way for way, _ in ways}) > 1:
        return RouteLeg(RouteWay.UNKNOWN, RouteCause.UNREAD, ingress.bdf)
    way, cause = ways[0]
    if way is RouteWay.ROOT and cause is not RouteCause.NOT_TRANSLATED:
        blocking_port = next(_find_blocking_ports(ports), None)
        if blocking_port is not None:
            return RouteLeg(RouteWay.UNKNOWN, RouteCause.NOT_FORWARDED, blocking_port)
    return RouteLeg(way, cause, None if way is RouteWay.SWITCH else ingress.bdf)


def _find_blocking_ports(ports: Iterable[PciDevice]) -> Iterator[Bdf]:
    """Yield ports that a redirected request reaches from their own egress and that lack upstream
    forwarding: their behaviour is undefined."""
    for port in ports:
        acs = _find_acs(port)
        faces_down = _find_port_type(port) in (PortType.ROOT_PORT, PortType.SWITCH_DOWNSTREAM)
        if faces_down and acs and UPSTREAM_FORWARDING not in acs:
            yield port.bdf


def _route_completion(egress: PciDevice | None, relaxed: bool | None) -> RouteLeg:
    acs = None if egress is None else _find_acs(egress)
    if egress is None or acs is None:
        return RouteLeg(RouteWay.UNKNOWN, RouteCause.UNREAD, None if egress is None else egress.bdf)
    way, cause = choose_completion_way(acs, relaxed=relaxed)
    return RouteLeg(way, cause, None if way is RouteWay.SWITCH else egress.bdf)


THROUGH_ROOT = 27 / 48
"""NCCL's rate between VMs with redirected requests, relative to direct ones: 27 and 48 GB/s over
two ports of 200 Gb/s. Source: NVIDIA/nccl#949."""

_PACKET_BYTES = 24
"""Framing, header with 64-bit address and LCRC of a packet. Source: PCIe 6.0, 2.2.1 and 4.2."""


def expect_bytes_per_s(host: Host, route: PeerRoute) -> float | None:
    """Return the expected rate of large reads or writes: the lowest link rate without headers,
    reduced to the measured share if the route is through the root complex. None if a link or the
    route is unknown."""
    if max(route.write.way, route.completion.way) >= RouteWay.UNKNOWN:
        return None
    rates = []
    for device in (route.requester, route.target):
        for link in _list_links_below(host, device, route.switch):
            rate = link.capable or link.current
            if rate is None:
                return None
            rates.append(rate.bytes_per_s)
    if not rates:
        return None
    registers = _find_control(host, route.requester)
    payload = None if registers is None else registers.max_payload_bytes
    share = 1.0 if payload is None else payload / (payload + _PACKET_BYTES)
    return min(rates) * share * (1.0 if route.is_direct else THROUGH_ROOT)


def _list_links_below(host: Host, device: PciDevice, switch: Bdf | None) -> Iterator[Link]:
    physical = (
        device if device.physical_function is None else host.find_device(device.physical_function)
    )
    for link in () if physical is None else list_links_above(physical, host.device_at):
        if link.lower.bdf == switch:
            return
        yield link


def list_peer_routes(
    host: Host, passed_gpus: frozenset[Bdf] = frozenset()
) -> tuple[PeerRoute, ...]:
    """Return routes from each NIC and GPU to each other GPU of the same user below one switch,
    ascending by GPU. passed_gpus: functions of one VM, whatever their drivers are. For NICs with
    virtual functions on VFIO, only these count."""
    gpus = host.devices_of_kind(DeviceKind.GPU)
    nics = host.devices_of_kind(DeviceKind.NIC)
    bdfs = {nic.physical_function for nic in nics if is_passed(nic) or nic.bdf in passed_gpus}
    users: dict[Bdf, list[PciDevice]] = {}  # by the root port, since a switch is below one
    for user in (*nics, *(gpu for gpu in gpus if gpu.physical_function is None)):
        ports = host.ports_above(user)
        is_whole = user.physical_function is None
        if ports and (
            user.bdf in passed_gpus or (user.bdf not in bdfs if is_whole else is_passed(user))
        ):
            users.setdefault(ports[-1].bdf, []).append(user)
    routes = []
    for gpu in gpus:
        is_vm = gpu.bdf in passed_gpus
        for port in host.ports_above(gpu)[-1:]:
            for user in users.get(port.bdf, ()):
                if user.bdf == gpu.bdf or (user.bdf in passed_gpus) is not is_vm:
                    continue
                is_same = None in (user.driver, gpu.driver) or is_passed(user) is is_passed(gpu)
                if is_vm or is_same:
                    routes.append(find_peer_route(host, user, gpu, in_vm=is_vm or is_passed(user)))
    return tuple(route for route in routes if route.switch is not None)
