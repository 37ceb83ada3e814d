"""Guest: start a domain, wait for its guest, and shut it down whatever happened. [I/O]

Source: qga/qapi-schema.json of QEMU (guest-exec, guest-exec-status), `virsh qemu-agent-command`.
"""

import base64
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol, TypeVar

import msgspec
from msgspec import Struct

from homenode.errors import HomenodeError, HostError, ToolError
from homenode.formats import NotJsonError, decode_json
from homenode.measure.access.machine import Channel, Machine, ScriptOutput
from homenode.measure.access.remote import RemoteMachine
from homenode.measure.access.ssh import HostKeyError, SshChannel
from homenode.measure.model import PROBE
from homenode.process import ToolTimeoutError
from homenode.safe.input_files import read_kernel_file
from homenode.text import command_line
from homenode.vm.hypervisor.connection import GuestAccess, Transport, is_local
from homenode.vm.hypervisor.virsh import Virsh, is_lost

_MAX_INPUT_BYTES = 60_000
"""A command is one argument of virsh, which has at most 128 KiB; see execve(2)."""

_ANSWER_S = 30
_FIRST_WAIT_S = 0.02
_MAX_WAIT_S = 0.5
_DISABLED = (
    "install qemu-guest-agent in it, and allow guest-exec: some distributions list it under "
)
_DISABLED += "BLOCK_RPCS or --block-rpcs in /etc/sysconfig/qemu-ga"


class GuestAgent(Struct, frozen=True):
    """See access.machine.Channel."""

    virsh: Virsh
    uuid: str  # UUID of the running domain
    domain: str

    @property
    def name(self) -> str:
        return f"{self.domain} through its guest agent"

    @property
    def most_input_bytes(self) -> int | None:
        return _MAX_INPUT_BYTES

    def close(self) -> None:
        """Nothing stays open between scripts."""

    def execute(self, script: str, timeout_s: float, input: str | None = None) -> ScriptOutput:
        arguments: dict[str, object] = {
            "path": "/bin/sh",
            "arg": ["-c", script],
            "capture-output": True,
        }
        if input is not None:
            content = input.encode("utf-8", "surrogateescape")  # a piece may cut a letter in two
            arguments["input-data"] = base64.b64encode(content).decode()
        process = self._ask("guest-exec", arguments).get("pid")
        if not isinstance(process, int):
            raise self._make_error("process number")
        deadline = time.monotonic() + timeout_s + _ANSWER_S
        wait_s = _FIRST_WAIT_S
        while True:
            answer = self._ask("guest-exec-status", {"pid": process})
            if answer.get("exited") is True:
                break
            if time.monotonic() > deadline:
                raise ToolTimeoutError(f"{self.name}: no end after {timeout_s:g} s")
            time.sleep(wait_s)
            wait_s = min(2 * wait_s, _MAX_WAIT_S)
        if answer.get("out-truncated") or answer.get("err-truncated"):
            raise ToolError(
                f"{self.name}: expected all of the output, found it cut short by the agent",
                hint="reach the guest by ssh",
            )
        return ScriptOutput(
            self._decode_text(answer, "out-data"), self._decode_text(answer, "err-data")
        )

    def _ask(self, command: str, arguments: dict[str, object]) -> dict[str, Any]:
        text = msgspec.json.encode({"execute": command, "arguments": arguments}).decode()
        try:
            reply = self.virsh.agent_command(self.uuid, text, _ANSWER_S)
        except HostError as error:
            hint = _DISABLED if "disabled" in error.message or "agent" in error.message else None
            raise ToolError(error.message, hint=hint or error.hint) from None
        except HomenodeError as error:  # the domain is gone
            raise ToolError(error.message, hint=error.hint) from None
        try:
            answer = decode_json(reply)
        except NotJsonError:
            raise self._make_error("JSON") from None
        return_value = answer.get("return") if isinstance(answer, dict) else None
        if not isinstance(return_value, dict):
            raise self._make_error("answer")
        return return_value

    def _decode_text(self, answer: dict[str, Any], key: str) -> str:
        data = answer.get(key, "")
        try:
            return base64.b64decode(data if isinstance(data, str) else "").decode(
                "utf-8", "replace"
            )
        except ValueError:  # no base64, or no ASCII
            raise self._make_error(f"{key} in base64") from None

    def _make_error(self, expected: str) -> ToolError:
        return ToolError(f"{self.name}: the guest agent returned no {expected}")


T = TypeVar("T")

_HELLO_S = 20.0
_BETWEEN_S = 1.0
_POWER_OFF_S = 15.0
_BOOT_ID = "/proc/sys/kernel/random/boot_id"
DAEMON_S = 20.0
"""Time to wait for a libvirt that does not answer, before it counts as gone."""


class GuestConnector(Protocol):
    """The way to reach guests; tests use simulated guests."""

    def machine(self, uuid: str) -> Machine:
        """Return the guest of a running domain. Raises ToolError until it answers."""

    def equip(self, machine: Machine) -> None:
        """Copy the measuring programs into the guest. Raises ToolError."""

    def leave(self, machine: Machine) -> None:
        """Remove them, if the guest still answers."""


class GuestReach(Struct, frozen=True):
    """Reach guests by ssh or through their agent. See Reach."""

    virsh: Virsh
    how: GuestAccess
    # the trial's known_hosts: the guest keeps its host key through all boots
    known_hosts: Path
    probe: bytes  # the program to copy into the guest

    def machine(self, uuid: str) -> Machine:
        channels = self._open_channels(uuid)
        for number, channel in enumerate(channels, start=1):
            machine = RemoteMachine(channel)
            try:
                machine.run(("true",), _HELLO_S).stdout_or_raise()
                break
            except ToolError as error:
                if number == len(channels):
                    if isinstance(error, HostKeyError) and number > 1:
                        # Its address may change.
                        raise ToolError(error.message, hint=error.hint) from None
                    raise
        return machine

    def equip(self, machine: Machine) -> None:
        assert isinstance(machine, RemoteMachine), "machine() made it"
        try:
            machine.put_program(PROBE, self.probe)
        except ToolError:
            with suppress(ToolError):
                machine.clean_up()
            raise

    def leave(self, machine: Machine) -> None:
        assert isinstance(machine, RemoteMachine), "machine() made it"
        machine.clean_up()

    def _open_channels(self, uuid: str) -> Sequence[Channel]:
        """Return at least one channel; by ssh one for each address that libvirt reports, as the
        host may reach only one of a guest's networks."""
        how = self.how
        if how.transport is Transport.AGENT:
            return (GuestAgent(self.virsh, uuid, self.virsh.find_domain(uuid).name),)
        addresses = self.virsh.list_addresses(uuid) if how.address is None else (how.address,)
        if not addresses:
            raise ToolError(
                "no address of the guest is known to libvirt",
                hint="--address sets it; --guest-access agent needs no address",
            )
        key = None if how.key is None else Path(how.key)
        return [SshChannel(ip, how.user, self.known_hosts, how.port, key, uuid) for ip in addresses]


def wait_for_answer(
    virsh: Virsh,
    uuid: str,
    reach: GuestConnector,
    timeout_s: float,
    on_wait: Callable[[float, float], None] = lambda waited_s, timeout_s: None,
) -> Machine:
    """The guest once it answers. on_wait: called after each failed try (waited_s, timeout_s).

    Raises ToolError if the guest ends first, ToolTimeoutError with the last failure, HostKeyError
    at once if another machine answers, and InputError if no channel to it exists.
    """
    start_s = time.monotonic()
    deadline = start_s + timeout_s
    while True:
        try:
            return reach.machine(uuid)
        except HostError as error:
            is_final = isinstance(error, HostKeyError) or not isinstance(error, ToolError)
            if is_final and not is_lost(error):
                raise
            failure = error
        if not retry_while_unavailable(lambda: virsh.find_domain(uuid)).is_active:
            raise ToolError(
                f"the guest ended before it answered: {failure.message}", hint=failure.hint
            )
        on_wait(time.monotonic() - start_s, timeout_s)
        if time.monotonic() > deadline:
            raise ToolTimeoutError(
                f"the guest did not answer within {timeout_s:g} s: {failure.message}",
                hint=failure.hint,
            )
        time.sleep(_BETWEEN_S)


def boot_of(machine: Machine) -> str:
    """Return the guest's boot id. Raises ToolError."""
    return machine.run(("cat", _BOOT_ID), _HELLO_S).stdout_or_raise().strip()


def get_host_boot(virsh: Virsh) -> str | None:
    """Return the boot id of the host that domains run on; None if that is another machine, or
    unknown. libvirt's numbers of running instances restart with each boot."""
    if not is_local(virsh.connect):
        return None
    content = read_kernel_file(_BOOT_ID)
    return None if content is None else content.decode().strip()


def is_same_host_boot(virsh: Virsh, boot_id: str | None) -> bool:
    """Return whether the host has not rebooted since, as far as that is known."""
    return boot_id is None or get_host_boot(virsh) in (None, boot_id)


def stop(
    virsh: Virsh, uuid: str, machine: Machine | None, timeout_s: float, run_id: int | None = None
) -> str:
    """Shut the domain down; return how, for people.

    libvirt requests a shutdown, then the guest powers off from inside, then it is destroyed.
    run_id: do nothing if another instance runs. Raises HostError if libvirt cannot end it.
    """
    if not _is_running(virsh, uuid, run_id):
        return "was off"
    with suppress(HostError):  # it has ended just now
        virsh.shut_down(uuid)
    if virsh.is_off_within(uuid, timeout_s / 2):
        return "shut down"
    reason = None
    if machine is not None:
        try:
            reason = machine.run(("poweroff",), _POWER_OFF_S).failure()
        except ToolError as error:  # the connection breaks during shutdown
            reason = error.message
        if virsh.is_off_within(uuid, timeout_s / 2):
            return "powered off from inside"
    try:
        virsh.destroy(uuid)
    except HostError:
        if virsh.find_domain(uuid).is_active:
            raise
    denial = "" if reason is None else f", and {reason}"
    return f"ended: it did not shut down within {timeout_s:g} s{denial}"


def retry_while_unavailable(
    work: Callable[[], T], trial: str | None = None, notify: Callable[[str], None] | None = None
) -> T:
    """Return the result of the work; retry it for some time while libvirt does not answer. trial:
    its name. notify: gets one line as soon as libvirt does not answer."""
    deadline = time.monotonic() + DAEMON_S
    while True:
        try:
            return work()
        except HostError as error:
            if not is_lost(error) or time.monotonic() > deadline:
                raise
            if notify is not None and trial is not None:
                notify(
                    f"libvirt does not answer; tried again for {DAEMON_S:g} s. After that, or "
                    f"Ctrl-C: {format_command(trial, 'resume')} continues, "
                    f"{format_command(trial, 'undo')} undoes it"
                )
                notify = None
        time.sleep(_BETWEEN_S)


def format_command(trial: str, action: str) -> str:
    """Return the command that resumes or undoes a trial, or shows its status."""
    return command_line("homenode", "trial", action, trial)


def is_there(virsh: Virsh, uuid: str) -> bool:
    """Return whether a domain is defined or runs. Raises HostError if libvirt does not answer."""
    return virsh.find(uuid) is not None


def _is_running(virsh: Virsh, uuid: str, run_id: int | None) -> bool:
    now = virsh.find_domain(uuid)
    return now.is_active and run_id in (None, now.run_id)
