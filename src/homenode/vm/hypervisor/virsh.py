"""Virsh: a libvirt daemon, used through its command line. [I/O]

Domains are passed by UUID: a name may begin with a dash, or be a number, like an id.
"""

import re
import time
from collections.abc import Sequence
from contextlib import suppress
from ipaddress import ip_interface

from homenode.errors import HomenodeError, HostError, InputError, UsageError, find_near
from homenode.process import ProgramResult, run
from homenode.text import command_line, shorten_list
from homenode.vm.hypervisor.connection import (
    DEFAULT,
    DomainState,
    LivePin,
    check_uri,
    find_machine,
    is_local,
    parse_dominfo,
    parse_pins,
)

_START = "systemctl start libvirtd (or virtqemud); this user must be in the group libvirt"
_UUID = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}\Z")
_LOST = (
    "Disconnected from",
    "End of file while reading",
    "Connection reset",
    "Cannot recv data",
    "Cannot write data",
    "client socket is closed",
)
"""Errors of virsh if the daemon disconnects: it may have made the change, or may still."""

_ADDRESS_SOURCES = ("lease", "agent", "arp")
"""Sources of a guest's addresses (virsh domifaddr): only libvirt's own networks have leases."""

_MISSING = re.compile("failed to get domain|Domain not found")
_TIMEOUT_S = 180.0
_MAX_SNAPSHOTS = 4096


def is_lost(error: HostError) -> bool:
    """Return whether the daemon is unreachable, or the connection was lost."""
    return any(words in error.message for words in ("failed to connect", *_LOST))


class RejectedError(HostError):
    """libvirt rejected the command; nothing of it is in progress."""


class Virsh:
    """A libvirt daemon. Every method raises HostError if virsh is missing or the daemon does not
    answer, and InputError if the domain does not exist."""

    __slots__ = ("connect",)

    def __init__(self, connect: str) -> None:
        self.connect = check_uri(connect)

    def find_domain(self, name: str) -> DomainState:
        """Return the domain of that name or UUID. If missing, the error lists existing domains."""
        try:
            return self._read_state(name)
        except InputError as error:
            if _MISSING.search(error.message) is None:
                raise
            is_file = name.endswith(".xml")
            hint = command_line("virsh", "define", name) if is_file else error.hint
            raise self._missing_domain(name, hint) from None

    def _read_state(self, name: str) -> DomainState:
        if not name.strip() or not name.isprintable():
            raise UsageError(f"domain {name!r}: expected a name or a UUID")
        lower = name.strip().lower()
        uuid = (
            lower if _UUID.match(lower) else self._run_quietly("domuuid", "--domain", name).strip()
        )
        state = parse_dominfo(self._run_quietly("dominfo", "--domain", uuid))
        if name.strip() != state.name and lower != state.uuid:
            raise InputError(
                f"{name!r} is not the name of a domain, but the id of {state.name!r}",
                hint="give its UUID: virsh list --all --uuid --name",
            )
        return state

    def find(self, uuid: str) -> DomainState | None:
        try:
            return self._read_state(uuid)
        except InputError:
            return None

    def _missing_domain(self, name: str, hint: str | None) -> InputError:
        try:
            names, running = self.list_domains(), self.list_domains(running=True)
        except HomenodeError:
            return InputError(f"no VM named {name}", hint=hint)
        place = "here" if self.connect == DEFAULT else f"at {self.connect}"
        states = (
            f"{other} ({'running' if uuid in running else 'shut off'})"
            for uuid, other in names.items()
        )
        text = f"{place}: {shorten_list(states, 3)}" if names else f"no VM is defined {place}"
        match = find_near(name, names.values())
        suggestion = f" (did you mean {match}?)" if match else ""
        return InputError(f"no VM named {name}{suggestion}; {text}", hint=hint)

    def list_domains(self, *, running: bool = False) -> dict[str, str]:
        """Return names by UUID of all domains, or of running domains."""
        output = self._run_quietly("list", *(() if running else ("--all",)), "--uuid", "--name")
        rows = (line.strip().partition(" ") for line in output.splitlines() if line.strip())
        return {uuid: name.strip() for uuid, _, name in rows}

    def read_definition(self, uuid: str) -> bytes:
        """Return the definition for the next start, as libvirt prints it, passwords included."""
        return self._run_quietly(
            "dumpxml", "--inactive", "--security-info", "--domain", uuid
        ).encode()

    def live_definition(self, uuid: str) -> bytes:
        """Return the definition of the running instance, as libvirt prints it."""
        return self._run_quietly("dumpxml", "--domain", uuid).encode()

    def list_snapshots(self, uuid: str) -> tuple[str, ...]:
        """Return the names of the domain's snapshots."""
        output = self._run_quietly("snapshot-list", "--name", "--domain", uuid)
        return tuple(line for line in output.splitlines() if line.strip())[:_MAX_SNAPSHOTS]

    def snapshot_definition(self, uuid: str, snapshot: str) -> bytes:
        """Return the XML of a snapshot: a <domainsnapshot> that contains the domain."""
        return self._run_quietly(
            "snapshot-dumpxml", "--domain", uuid, "--snapshotname", snapshot
        ).encode()

    def read_capabilities(self) -> str:
        """Return the daemon's host as XML, for machine/tools/virsh_capabilities.py."""
        return self._run_quietly("capabilities")

    def node_devices(self, capability: str) -> tuple[str, ...]:
        """Return libvirt's names of the host's devices with a capability ("pci")."""
        return tuple(self._run_quietly("nodedev-list", "--cap", capability).split())

    def define(self, path: str, kept_open: Sequence[int] = ()) -> None:
        """Define the domain of the document at an absolute path, completely or not at all.

        kept_open: descriptors that stay open until virsh ends, even if this process is killed.
        Raises RejectedError if libvirt rejects it; after another error libvirt may still define it.
        """
        self._run_quietly("define", "--file", path, kept_open=kept_open)

    def live_pins(self, uuid: str) -> tuple[LivePin, ...]:
        """Return the pins of vCPUs, emulator and IOThreads of a running domain, in that order."""
        return (
            *parse_pins(self._run_quietly("vcpupin", "--live", "--domain", uuid), "vcpu"),
            *parse_pins(self._run_quietly("emulatorpin", "--live", "--domain", uuid), "emulator"),
            *parse_pins(self._run_quietly("iothreadinfo", "--live", "--domain", uuid), "iothread"),
        )

    def pin_live(self, uuid: str, pin: LivePin) -> None:
        """Pin one thread of a running domain; its definition is not changed."""
        number = {"vcpu": ("--vcpu",), "iothread": ("--iothread",)}.get(pin.kind, ())
        words = (*number, str(pin.number)) if number else ()
        self._run_quietly(
            f"{pin.kind}pin", "--live", "--domain", uuid, *words, "--cpulist", str(pin.pus)
        )

    def start(self, uuid: str, kept_open: Sequence[int] = ()) -> None:
        """Start a domain that is shut off, with its current definition. kept_open: as in define."""
        self._run_quietly("start", "--domain", uuid, kept_open=kept_open)

    def start_paused(self, uuid: str, kept_open: Sequence[int] = ()) -> None:
        """Start a domain paused: its guest runs no instruction before it is resumed."""
        self._run_quietly("start", "--paused", "--domain", uuid, kept_open=kept_open)

    def query_monitor(self, uuid: str, command: str, *, is_text: bool = False) -> str:
        """Return QEMU's answer to a monitor query; is_text: in the human monitor's format."""
        form = ("--hmp",) if is_text else ()
        return self._run_quietly("qemu-monitor-command", "--domain", uuid, *form, "--cmd", command)

    def shut_down(self, uuid: str) -> None:
        """Request a shutdown of the guest, which may ignore it."""
        self._run_quietly("shutdown", "--domain", uuid)

    def is_off_within(self, uuid: str, timeout_s: float) -> bool:
        """Return whether a domain is shut off within the time."""
        deadline = time.monotonic() + timeout_s
        while self.find_domain(uuid).is_active:
            if time.monotonic() > deadline:
                return False
            time.sleep(min(0.25, timeout_s / 4))
        return True

    def destroy(self, uuid: str) -> None:
        """Destroy a running domain: end it at once."""
        self._run_quietly("destroy", "--domain", uuid)

    def undefine(self, uuid: str) -> None:
        """Remove a domain that is shut off, with its NVRAM file. Its disks stay."""
        self._run_quietly("undefine", "--nvram", "--domain", uuid)

    def list_addresses(self, uuid: str) -> tuple[str, ...]:
        """Return possible addresses of a running domain, IPv4 first; () if unknown. Source: `virsh
        domifaddr` with --quiet: name, MAC, protocol and address/prefix a line."""
        for source in _ADDRESS_SOURCES:
            try:
                output = self._run_quietly("domifaddr", "--domain", uuid, "--source", source)
            except RejectedError as error:  # its agent does not answer (yet)
                if is_lost(error):
                    raise
                continue
            rows = (line.split() for line in output.splitlines())
            texts = [row[3] for row in rows if len(row) == 4 and row[2] in ("ipv4", "ipv6")]
            addresses = []
            for text in texts:
                with suppress(ValueError):  # an agent reports what its guest wants
                    addresses.append(ip_interface(text).ip)
            outer = [ip for ip in addresses if not (ip.is_loopback or ip.is_link_local)]
            if outer:
                return tuple(map(str, sorted(outer, key=lambda ip: ip.version)))
        return ()

    def agent_command(self, uuid: str, command: str, timeout_s: int) -> str:
        """Return the guest agent's answer to a JSON command."""
        return self._run_quietly(
            "qemu-agent-command", "--domain", uuid, "--timeout", str(timeout_s), "--cmd", command
        )

    def _run_quietly(self, command: str, *words: str, kept_open: Sequence[int] = ()) -> str:
        argv = ("virsh", "--connect", self.connect, "--quiet", command, *words)
        result = run(argv, _TIMEOUT_S, kept_open=kept_open)
        if result.returncode == 0:
            return result.stdout
        raise _make_error(result, command, self.connect)


def _format_remote_hint(connect: str) -> str:
    """Return a command that tests the other machine's name, network, login and daemon."""
    return command_line("ssh", find_machine(connect), "virsh", "list", "--all")


def _make_error(result: ProgramResult, command: str, connect: str) -> HostError | InputError:
    text = "; ".join(result.list_messages())[:600] or result.failure() or ""
    message = f"virsh {command} at {connect}: {text}"
    if "failed to connect" in text:
        return RejectedError(
            message, hint=_START if is_local(connect) else _format_remote_hint(connect)
        )
    if _MISSING.search(text):
        return InputError(message, hint=command_line("virsh", "-c", connect, "list", "--all"))
    if result.returncode < 0 or any(words in text for words in _LOST):
        return HostError(message)
    return RejectedError(message)
