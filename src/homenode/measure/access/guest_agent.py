"""GuestAgent: a channel through the QEMU guest agent, which needs no network and no login. [I/O]

Source: qga/qapi-schema.json of QEMU (guest-exec, guest-exec-status), `virsh qemu-agent-command`.
"""

import base64
import time
from typing import Any

import msgspec
from msgspec import Struct

from homenode.errors import HomenodeError, HostError, ToolError
from homenode.json_text import NotJsonError, decode_json
from homenode.measure.access.machine import ScriptOutput
from homenode.process import ToolTimeoutError
from homenode.vm.hypervisor.virsh import Virsh

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
