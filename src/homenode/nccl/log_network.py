"""LogNetwork: what NCCL's log says of its network: NICs, GPUDirect RDMA, slow links and failures.

Versions: 2.8 to 2.30. Source: INFO and WARN messages of src/transport/net_ib (net_ib.cc before
2.28), net_socket.cc, src/transport/net.cc, src/graph/topo.cc and paths.cc; recorded logs of
NVIDIA/nccl issues 214, 523, 928, 1052, 1464 and NVIDIA/nccl-tests issues 256, 380.
"""

import re
from collections import Counter
from collections.abc import Iterator

from msgspec import Struct, field

from homenode.catalogue import finding
from homenode.findings import Finding
from homenode.wording import first_few, plural

_SLOW_GB_PER_S = 1.0
"""No PCIe link that a GPU or NIC has on purpose is as slow to NCCL: 2.5 GT/s x8 counts 1.5."""

_BY_ACS = frozenset({4, 10, 11})
"""Local protection, remote access and remote operation: the peer request went elsewhere."""

_NEAR = frozenset({"PIX", "PXB", "P2C"})
_MOST_NAMED = 4
_MOST_LOCAL = 8  # GPUs of a host
_MANY_GPUS = 4


Said = tuple[int, str]
"""The number of a line of a log, and the words behind "NCCL INFO" and the like in it."""


class LogNetwork(Struct, kw_only=True):
    """devices: NICs that NCCL uses by verbs. relaxed: it says [RO]. channels: (network, by
    GPUDirect RDMA) of each channel between hosts. off: why NCCL says that it does without, each
    once. slow: links below 1 GB/s. nearest: the path of each GPU to its nearest NIC. errors: status
    and vendor's error of failed completions. senders, nics: ranks that send to other hosts, and by
    which NICs. variables: NCCL's own, of the environment. socket_alone: NCCL chose TCP for all.
    ranks, local: of the communicator, and GPUs of a host. lines: the first line that shows what its
    key names."""

    devices: int | None = None
    relaxed: bool = False
    channels: Counter[tuple[str, bool]] = field(default_factory=Counter)
    off_by_driver: dict[str, None] = field(default_factory=dict)
    off_by_distance: dict[str, None] = field(default_factory=dict)
    slow: dict[str, str] = field(default_factory=dict)
    nearest: dict[str, str] = field(default_factory=dict)
    errors: Counter[tuple[int, int]] = field(default_factory=Counter)
    senders: set[str] = field(default_factory=set)
    nics: set[str] = field(default_factory=set)
    variables: dict[str, str] = field(default_factory=dict)
    socket_alone: bool = False
    ranks: int = 0
    local: int = 0
    ring_channels: int = 0
    lines: dict[object, int] = field(default_factory=dict)

    @property
    def is_silent(self) -> bool:
        said = (self.channels, self.slow, self.nearest, self.errors)
        return not any((*said, self.off_by_driver, self.off_by_distance))

    def place(self, source: str, *names: object) -> str:
        """Where the first of these that a line shows is in the log."""
        found = next((self.lines[name] for name in names if name in self.lines), None)
        return source if found is None else f"{source}:{found}"

    @property
    def without_gdr(self) -> int:
        return sum(
            count for (net, gdr), count in self.channels.items() if net != "Socket" and not gdr
        )


def network_of_log(said: list[Said]) -> LogNetwork:
    """What a log says of the network. said: each once."""
    found = LogNetwork()
    for number, words in said:
        if words.startswith(OF_RANKS) and "via NET/" not in words:
            continue
        for pattern, take in _BY_FIRST.get(words[:1], ()):
            if match := pattern.fullmatch(words):
                found.lines.setdefault(take(found, match), number)
                break
    return found


_SLOW_LINK = re.compile(
    r"\+ PCI\[(\d{1,4}\.\d{1,2})\] - ((?:PCI|GPU|NIC)/[0-9a-fA-F-]{1,40})(?: .{0,80})?"
)
_PATHS = re.compile(r"(GPU/[0-9a-fA-F-]{1,40}) :(.*NET/.*)")
_TO_NET = re.compile(r"NET/[0-9a-fA-F-]{1,40} \(\d{1,4}/[0-9.]{1,12}/([A-Z0-9]{3})\)")
_VIA_NET = re.compile(
    r"(?:Channel|Ring) \S{1,12} : (\S{1,24}) -> \S{1,24} \[(send|receive)\] "
    r"via NET/(\w{1,40})/(\d{0,4})\S{0,40}.*"
)
_USING = re.compile(r"NET/IB\s?: Using .*")
_NO_DEVICE = re.compile(r"NET/IB\s?: No device found.*")
_OFF_BY_DRIVER = re.compile(  # sockets have none anywhere
    r"NET/(?!Socket)\w{1,40}\s?: GPU Direct RDMA Disabled for HCA (\d{1,4} '[^']{1,60}')"
)
_OFF_BY_DISTANCE = re.compile(
    r"(?:NET/\w{1,40}\s?: )?GPU Direct RDMA Disabled for "
    r"(GPU.{1,100}\(distance \d{1,3} >=? \d{1,3}\)).*"
)
_COMPLETION = re.compile(
    r"NET/IB\s?: Got completion .{0,160}?(?:status=(?:\w{1,40}\()?|error )(\d{1,3})\b"
    r".{0,80}?vendor[ _]err[ =](\d{1,6})\b.*"
)
_CHANNELS = re.compile(r"(\d{1,4}) coll channels,.*")
_SET = re.compile(r"(NCCL_IB_(?:HCA|DISABLE)) set (?:by environment )?to (\S{1,200}?)\.?")
_SOCKET_ALONE = re.compile(r"Using network Socket")
_RANK = re.compile(
    r"(?:\w{1,40} )?comm \w{1,20} rank \d{1,6} nranks (\d{1,6}) cudaDev (\d{1,3})\b.*"
)
_LOCAL = re.compile(
    r"comm \w{1,20} rank \d{1,6} nRanks (\d{1,6}) nNodes \d{1,6} localRanks (\d{1,3})\b.*"
)
OF_RANKS = ("Channel ", "Ring ", "Trees ")  # most lines; of these, those of the network count
_DEVICE = re.compile(r"\[\d{1,3}\]")


def _take_link(found: LogNetwork, match: "re.Match[str]") -> object:
    if float(match[1]) >= _SLOW_GB_PER_S:
        return None
    found.slow[match[2]] = match[1]
    return "slow"


def _take_paths(found: LogNetwork, match: "re.Match[str]") -> object:
    kinds = _TO_NET.findall(match[2])
    if not kinds:
        return None
    near = next((kind for kind in kinds if kind in _NEAR), kinds[0])
    found.nearest.setdefault(match[1], near)
    return "near" if near in _NEAR else "far"


def _take_channel(found: LogNetwork, match: "re.Match[str]") -> object:
    net, by_gdr = match[3], "/GDRDMA" in match[0]
    found.channels[net, by_gdr] += 1
    if match[2] == "send" and match[4]:
        found.senders.add(match[1])
        found.nics.add(match[4])
    return "socket" if net == "Socket" else "gdr" if by_gdr else "no gdr"


def _take_devices(found: LogNetwork, match: "re.Match[str]") -> object:
    found.devices = len(_DEVICE.findall(match[0].partition("; OOB")[0]))
    found.relaxed = found.relaxed or "[RO]" in match[0]
    return "devices"


def _take_none(found: LogNetwork, _: "re.Match[str]") -> object:
    found.devices = found.devices or 0
    return "no device"


def _take_variable(found: LogNetwork, match: "re.Match[str]") -> object:
    found.variables[match[1]] = match[2]
    return match[1]


def _take_rank(found: LogNetwork, match: "re.Match[str]") -> object:
    local = int(match[2]) + (match.re is _RANK)  # of a GPU's number, how many there are at least
    found.ranks, found.local = max(found.ranks, int(match[1])), max(found.local, local)
    return None


def _take_driver(found: LogNetwork, match: "re.Match[str]") -> object:
    found.off_by_driver.setdefault(match[1])
    return "off"


def _take_distance(found: LogNetwork, match: "re.Match[str]") -> object:
    found.off_by_distance.setdefault(match[1])
    return "off"


def _take_error(found: LogNetwork, match: "re.Match[str]") -> object:
    error = int(match[1]), int(match[2])
    found.errors[error] += 1
    return error


def _take_count(found: LogNetwork, match: "re.Match[str]") -> object:
    found.ring_channels = max(found.ring_channels, int(match[1]))
    return None


_ROWS = (
    ("CR", _VIA_NET, _take_channel),
    ("+", _SLOW_LINK, _take_link),
    ("G", _PATHS, _take_paths),
    ("N", _USING, _take_devices),
    ("N", _NO_DEVICE, _take_none),
    ("N", _SET, _take_variable),
    ("U", _SOCKET_ALONE, lambda found, _: setattr(found, "socket_alone", True)),
    ("cn", _RANK, _take_rank),
    ("c", _LOCAL, _take_rank),
    ("N", _OFF_BY_DRIVER, _take_driver),
    ("GN", _OFF_BY_DISTANCE, _take_distance),
    ("N", _COMPLETION, _take_error),
    ("0123456789", _CHANNELS, _take_count),
)
"""Its first letters, the form of what is said, and what takes it and gives what the line shows."""
_BY_FIRST = {
    first: tuple((form, take) for letters, form, take in _ROWS if first in letters)
    for first in {letter for letters, _, _ in _ROWS for letter in letters}
}


def network_stated(found: LogNetwork) -> Iterator[str]:
    """What the log says of it, for people."""
    between = sum(found.channels.values())
    if between:
        names = ", ".join(dict.fromkeys(net for net, _ in found.channels))
        gdr = sum(count for (_, gdr), count in found.channels.items() if gdr)
        yield f"network {names}: GPUDirect RDMA on {gdr} of {between} ends of channels"
    if found.devices is not None:
        order = ", relaxed ordering " + ("on" if found.relaxed else "not said to be on")
        yield f"{plural(found.devices, 'NIC')} by verbs{order if found.devices else ''}"
    if found.ring_channels:
        yield plural(found.ring_channels, "channel") + " for collectives"


def log_network_findings(found: LogNetwork, source: str) -> Iterator[Finding]:
    """What of it costs bandwidth, or fails."""
    if found.slow:
        rates = ", ".join(sorted(set(found.slow.values())))
        yield finding(
            "nccl-log-slow-link",
            f"{plural(len(found.slow), 'link')}: {first_few(found.slow, _MOST_NAMED)}",
            expected="links of several GB/s",
            observed=f"{rates} GB/s to NCCL: ports of a virtual switch, 2.5 GT/s x1",
            source=found.place(source, "slow"),
        )
    sockets = sum(count for (net, _), count in found.channels.items() if net == "Socket")
    if sockets:
        none = "NET/IB found no device" if found.devices == 0 else "over TCP"
        yield finding(
            "nccl-log-socket",
            f"{plural(sockets, 'end')} of channels between hosts",
            expected="NET/IB, or the plugin of another RDMA network",
            observed=f"NET/Socket: {none}",
            source=found.place(source, *(() if found.devices else ("no device",)), "socket"),
        )
    elif (
        found.socket_alone
        and found.variables.get("NCCL_IB_DISABLE") == "1"
        and found.ranks > _MOST_LOCAL
    ):
        yield finding(
            "nccl-log-socket",
            f"{found.ranks} ranks",
            expected="NET/IB, or the plugin of another RDMA network",
            observed="NET/Socket: NCCL_IB_DISABLE is 1",
            source=found.place(source, "NCCL_IB_DISABLE"),
        )
    yield from _few_nics(found, source)
    # Of pairs that are far NCCL says so as well, while the near ones have it.
    has_gdr = any(by_gdr for _, by_gdr in found.channels)
    if found.without_gdr or (not has_gdr and (found.off_by_driver or found.off_by_distance)):
        yield _gdr_off(found, source)
    for (status, vendor), count in sorted(found.errors.items()):
        if status in _BY_ACS:
            yield finding(
                "nccl-log-completion",
                "NET/IB",
                expected="transfers that complete",
                observed=f"{plural(count, 'failed completion')}: status {status}, vendor error "
                f"{vendor}",
                source=found.place(source, (status, vendor)),
            )


def _few_nics(found: LogNetwork, source: str) -> Iterator[Finding]:
    """Ranks that share a NIC while others are idle, or that NCCL_IB_HCA leaves one for."""
    used, known = len(found.nics), found.devices or 0
    hca = found.variables.get("NCCL_IB_HCA")
    if 0 < used < min(known, len(found.senders)):
        observed, shown = f"{used} of the {known} that NCCL uses by verbs", "devices"
    elif hca is not None and known == 1 and found.local >= _MANY_GPUS:
        observed, shown = f"one: NCCL_IB_HCA is {hca}", "NCCL_IB_HCA"
    else:
        return
    yield finding(
        "nccl-log-nics-few",
        f"{max(len(found.senders), found.local)} GPUs that send to other hosts",
        expected="a NIC for each, as far as there are",
        observed=observed,
        source=found.place(source, shown),
    )


def _gdr_off(found: LogNetwork, source: str) -> Finding:
    """With NCCL's own reason where it gives one, else by the paths of its table."""
    far = sorted({kind for kind in found.nearest.values() if kind not in _NEAR})
    case: str | None = None
    if found.off_by_driver:
        case, why = "by the driver", f"disabled for HCA {first_few(found.off_by_driver, 2)}"
    elif found.off_by_distance:
        case, why = "by distance", f"disabled for {first_few(found.off_by_distance, 1)}"
    elif far:
        case, why = "by distance", f"the nearest NICs are {' and '.join(far)}, beyond PXB"
    else:
        why = "no reason given"
    count = f"{found.without_gdr} of {sum(found.channels.values())} ends of channels without it; "
    return finding(
        "nccl-log-gdr-off",
        "GPUDirect RDMA",
        expected="channels between hosts via NET/IB/…/GDRDMA",
        observed=(count if found.without_gdr else "") + why,
        case=case,
        source=found.place(source, "off", "far", "no gdr"),
    )
