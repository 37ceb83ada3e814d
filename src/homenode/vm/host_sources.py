"""HostSources: many hosts, from directories, URIs and hosts times a number; a daemon's host. [I/O]

The host of a libvirt daemon decides whether a plan for a named host may be defined there.
"""

import re
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from msgspec import Struct
from msgspec.structs import replace

from homenode.bdf import Bdf
from homenode.cpuset import CpuSet
from homenode.errors import HomenodeError, InputError, NotKnownError, UsageError, of_os
from homenode.findings import NO_VMS, Gap, format_gaps, list_unread_vms
from homenode.machine.tools import virsh_capabilities
from homenode.machine.topology import Host, summarise
from homenode.text import command_line, did_you_mean, plural
from homenode.vm.domain.read import read_running_domain
from homenode.vm.hypervisor.connection import DEFAULT, check_host, find_machine, is_local
from homenode.vm.hypervisor.virsh import Virsh
from homenode.vm.model import Vm
from homenode.vm.plan import Plan
from homenode.vm.sources import is_host, load_host

MAX_HOSTS = 100_000
_JOBS = 8  # sources read in parallel, as ssh mostly waits
_TIMES = re.compile(r"(?P<name>.+)\*(?P<count>-?[0-9]{1,18})\Z", re.ASCII)
_URI = re.compile(r"[a-z][a-z0-9]*(\+[a-z0-9]+)?://", re.ASCII)
_SSH_URI = re.compile(r"qemu\+ssh://(?P<server>[^/?#]+)(/|\Z)", re.ASCII)
_SUFFIXES = (".tar.gz", ".tgz", ".tar.bz2", ".tar.xz", ".tar", ".toml", ".xml", ".json", ".txt")

Progress = Callable[[int, int], None]


class NamedHost(Struct, frozen=True, kw_only=True):
    name: str  # unique among them; also the name of `host`
    source: str  # the source that it was read from
    host: Host

    @property
    def libvirt_uri(self) -> str:
        """The URI for virsh: the host's source if it is a URI, else made from its name."""
        return self.source if "://" in self.source else f"qemu+ssh://{self.name}/system"


class NamedHosts(Struct, frozen=True):
    """Hosts by name, and the sources that could not be read."""

    hosts: tuple[NamedHost, ...]
    unread: tuple[Gap, ...]


def read_hosts(sources: Sequence[str], progress: Progress = lambda done, total: None) -> NamedHosts:
    """Read the hosts of all sources. progress: called with the number of sources read, and of all.
    Raises UsageError for no source, InputError if none gives a host."""
    if not sources:
        raise UsageError(
            "a pool has no hosts",
            hint="a directory of captures, NAME*COUNT (hgx-h100*40), qemu+ssh://HOST/system",
        )
    unread: list[Gap] = []
    entries = [entry for source in sources for entry in _list_entries(source, unread)]
    hosts: dict[str, NamedHost] = {}
    with ThreadPoolExecutor(max_workers=_JOBS) as threads:
        for number, read in enumerate(threads.map(_read, entries), start=1):
            progress(number, len(entries))
            if isinstance(read, Gap):
                unread.append(read)
                continue
            for named_host in read:
                first = hosts.setdefault(named_host.name, named_host)
                if first is not named_host:
                    reason = f"duplicate name {named_host.name!r}: {first.source} has it"
                    unread.append(Gap(named_host.source, reason))
    if not hosts:
        first_unread = unread[0]
        raise InputError(
            str(first_unread),
            hint=f"{_guess(first_unread.subject)}a pool is a directory of captures, a libvirt URI, "
            "or a host times a number: 'hgx-h100*40'",
        )
    ordered_hosts = sorted(hosts.values(), key=lambda named_host: natural_key(named_host.name))
    return NamedHosts(tuple(ordered_hosts), tuple(unread))


def _list_entries(source: str, unread: list[Gap]) -> list[tuple[str, str | None]]:
    """(source, name) of each host, or hosts times a number; name: for files of a directory."""
    directory = Path(source)
    try:
        if not directory.is_dir() or _is_tree(directory):
            return [(source, None)]
        paths = sorted(path for path in directory.iterdir() if not path.name.startswith("."))
    except (OSError, ValueError) as error:
        unread.append(_make_unread_gap(source, of_os(error, source, "a directory").message))
        return []
    if not paths:
        unread.append(Gap(source, "missing captures or host.toml files"))
    return [(str(path), _plain_name(path.name)) for path in paths]


def _read(entry: tuple[str, str | None]) -> tuple[NamedHost, ...] | Gap:
    source, name = entry
    times = _TIMES.match(source)
    try:
        if times is not None and not Path(source).exists():
            count = int(times["count"])
            if not 1 <= count <= MAX_HOSTS:
                raise InputError(f"{source}: expected 1 to {MAX_HOSTS} hosts, found {count}")
            host = load_host(times["name"])
            names = [f"{host.name or times['name']}-{number}" for number in range(1, count + 1)]
        elif _URI.match(source):
            host = _read_host_of_uri(source)
            names = [_name_of_uri(source)]
        elif not is_host(source):
            return Gap(source, "no such file, directory or shipped host")
        else:
            host = load_host(source)
            names = [name or host.name or source]
    except HomenodeError as error:
        return _make_unread_gap(source, error.message)
    except (OSError, ValueError) as error:
        return _make_unread_gap(source, of_os(error, source, "a host").message)
    return tuple(
        NamedHost(name=host_name, source=source, host=replace(host, name=host_name))
        for host_name in names
    )


def _make_unread_gap(source: str, message: str) -> Gap:
    """Return the reader's message without the source's name at its start."""
    for name in (source, f"ssh://{source}", source.rstrip("/").rpartition("/")[2]):
        message = message.removeprefix(f"{name}: ")
    return Gap(source, message)


def _guess(source: str) -> str:
    from homenode.machine.description.parse import list_shipped_hosts

    return did_you_mean(source, list_shipped_hosts())


def _read_host_of_uri(uri: str) -> Host:
    from homenode.vm.hypervisor.connection import check_uri, is_local

    check_uri(uri)
    if is_local(uri):
        return load_host(None)
    match = _SSH_URI.match(uri)
    if match is None:
        raise UsageError(
            f"{uri}: expected qemu:///system or qemu+ssh://HOST/system, found another transport"
        )
    return read_host_over_ssh(match["server"])


def read_host_over_ssh(server: str, timeout_s: float | None = None) -> Host:
    """Read a host over ssh. server: [user@]host[:port]. timeout_s: None = ssh may prompt on the
    terminal. Raises HostError."""
    from homenode.machine.discover.host import discover
    from homenode.machine.snapshot.capture import SSH_TIMEOUT_S, collect_over_ssh
    from homenode.vm.domain.read import read_running_domain

    name = f"ssh://{server}" if re.search(r"[^:]:[0-9]{1,5}\Z", server) else server
    is_one_of_many = timeout_s is not None
    snapshot = collect_over_ssh(name, timeout_s or SSH_TIMEOUT_S, batch=is_one_of_many)
    return discover(snapshot, read_running_domain)


def _name_of_uri(uri: str) -> str:
    match = _SSH_URI.match(uri)
    server = match["server"] if match else "localhost"
    return re.sub(r":[0-9]+\Z", "", server.rpartition("@")[2])


def _plain_name(name: str) -> str:
    """Return a file's name without suffixes: gpu-7 for gpu-7.tar.gz.

    >>> _plain_name("gpu-7.example.org.tar.gz"), _plain_name("gpu-7.toml"), _plain_name("gpu.7")
    ('gpu-7.example.org', 'gpu-7', 'gpu.7')
    """
    suffix = next((suffix for suffix in _SUFFIXES if name.endswith(suffix)), "")
    return name.removesuffix(suffix) or name


def _is_tree(directory: Path) -> bool:
    """Return whether a directory is one host: a tree of /sys or an unpacked capture."""
    marks = ("sys", "devices", "snapshot", "manifest.json")
    return any((directory / mark).exists() for mark in marks)


def natural_key(name: str) -> list[tuple[int, int | str]]:
    """Return a sort key that puts gpu-2 before gpu-10.

    >>> sorted(["gpu-10", "gpu-2", "a"], key=natural_key)
    ['a', 'gpu-2', 'gpu-10']
    """
    parts = re.split(r"([0-9]+)", name)
    return [(0, int(part)) if part.isdecimal() else (1, part) for part in parts if part]


_NODE_DEVICE = re.compile(r"pci_([0-9a-f]{4,8})_([0-9a-f]{2})_([0-9a-f]{2})_([0-7])\Z")


def load_daemon_host(source: str | None, virsh: Virsh) -> Host:
    """Return the host of a daemon's VMs, with its current allocations.

    source: the user's name for it; an equal machine, such as a capture of this one, is accepted.
    Raises InputError if it is another machine or cannot be compared, UsageError if a remote daemon
    needs a source.
    """
    check_host(source, virsh.connect)
    if not is_local(virsh.connect):
        planned_host = load_host(source)
        _reject_unlike(planned_host, virsh)
        unread = list_unread_vms(planned_host.gaps)
        gaps = tuple(gap for gap in planned_host.gaps if gap not in unread)
        return _add_domains(replace(planned_host, domains=(), gaps=gaps), virsh)
    machine = _read_this_machine()
    if source is not None:
        planned_host = load_host(source)
        has_fingerprint = bool(planned_host.pci_devices) and not planned_host.nodes_assumed
        print_of_planned = planned_host.fingerprint if has_fingerprint else ""
        _reject_other(_format_counts(planned_host), print_of_planned, machine)
        machine = replace(machine, reserve=planned_host.reserve or machine.reserve)
    return machine if virsh.connect == DEFAULT else _add_domains(machine, virsh)


def _add_domains(host: Host, virsh: Virsh) -> Host:
    """Return the host with the domains of a further daemon, not this machine's system daemon."""
    listed_uuids = {domain.uuid for domain in host.domains}
    running = virsh.list_domains(running=True)
    domains = [
        read_running_domain(virsh.live_definition(uuid), running=True, source=name)
        if uuid in running
        else read_running_domain(virsh.read_definition(uuid), running=False, source=name)
        for uuid, name in virsh.list_domains().items()
        if uuid not in listed_uuids
    ]
    all_domains = sorted((*host.domains, *domains), key=lambda domain: domain.name)
    gaps = tuple(gap for gap in host.gaps if gap.subject != NO_VMS)
    return replace(host, domains=tuple(all_domains), gaps=gaps)


def reject_unread_vms(host: Host) -> None:
    """Raise NotKnownError if VMs were not read: a new definition may use their resources."""
    for line in format_gaps(list_unread_vms(host.gaps)):
        raise NotKnownError(
            f"{host.name}: cannot tell which CPUs, memory and devices are free: {line}; nothing "
            "was changed",
            hint="virsh -r -c qemu:///system list --all shows the cause",
        )


def reject_plan_for_other(plan: Plan, machine: Host) -> None:
    """Raise InputError for a saved plan that is not shown to be for the daemon's host."""
    _reject_other(plan.host_name or "a host without a name", plan.host_fingerprint, machine)
    reject_tuned_for_other(plan.vm, machine)


def reject_tuned_for_other(vm: Vm, machine: Host) -> None:
    """Raise InputError for a tuned definition that is not shown to be for the daemon's host, or
    that has devices that this host lacks."""
    record = vm.record
    if record is not None and record.host is not None and not machine.has_fingerprint(record.host):
        raise InputError(
            f"{vm.name} was planned for a host other than {machine.name}, or for it before it "
            "changed; nothing was changed",
            hint=command_line("homenode", "apply", vm.name),
        )
    devices = (device.bdf for device in vm.hostdevs if device.uuid is None)
    missing = sorted(bdf for bdf in devices if bdf not in machine.device_at)
    if missing and machine.pci_devices:
        raise InputError(
            f"{vm.name}: {machine.name} has no device {', '.join(map(str, missing))}; nothing was "
            "changed",
            hint="homenode show lists the devices of this machine",
        )


def _read_this_machine() -> Host:
    return load_host(None)


def _format_counts(host: Host) -> str:
    size = summarise(host)
    cpus = plural(size.pus, "CPU") if size.pus else "CPUs unknown"
    gpus = plural(size.gpus, "GPU") if size.pci_functions else "GPUs unknown"
    return f"{host.name} ({cpus}, {gpus})"


def _reject_other(name: str, fingerprint: str, machine: Host) -> None:
    """name: the name of the plan's host, with its size. fingerprint: "" = missing."""
    if not fingerprint or machine.nodes_assumed or not machine.pci_devices:
        raise InputError(
            f"the plan is for {name}, which cannot be compared with the daemon's host, "
            f"{_format_counts(machine)}, without NUMA nodes and PCI functions; nothing was changed",
            hint="without --host, the plan is made for this machine",
        )
    if not machine.has_fingerprint(fingerprint):
        raise InputError(
            f"the plan is for {name}, not for the daemon's host, {_format_counts(machine)}; "
            "nothing was changed",
            hint="homenode plan VM --host HOST -o tuned.xml writes a file for another host",
        )


def _reject_unlike(host: Host, virsh: Virsh) -> None:
    """Compare a host with the nodes and PCI functions that a daemon elsewhere shows."""
    name = find_machine(virsh.connect)
    cells = virsh_capabilities.parse(virsh.read_capabilities())
    # libvirt gives no siblings of CPUs that are offline.
    remote_pus = {
        cell.node: CpuSet(pu for pu, pus in cell.siblings_of_pu.items() if pus is not None)
        for cell in cells
    }
    host_pus = {node.index: node.pus for node in host.nodes if node.pus or node.memory_bytes}
    expected_bdfs = {device.bdf for device in host.pci_devices if device.physical_function is None}
    missing = sorted(expected_bdfs - _list_functions(virsh))
    if host.nodes_assumed or not expected_bdfs:
        difference = "it shows no NUMA nodes or no PCI functions to compare"
    elif missing:
        difference = f"{name} has no {missing[0]}"
    elif remote_pus != host_pus:
        difference = "its NUMA nodes have other CPUs"
    else:
        return
    raise InputError(
        f"--host {host.name}: not shown to be the daemon's host, {name}: {difference}; nothing "
        "was changed",
        hint=command_line("homenode", "capture", "--ssh", name, "-o", "host.tar.gz"),
    )


def _list_functions(virsh: Virsh) -> set[Bdf]:
    names = map(_NODE_DEVICE.match, virsh.node_devices("pci"))
    return {
        Bdf(*(int(part, 16) for part in match.groups())) for match in names if match is not None
    }
