"""Ssh: a channel to a guest by OpenSSH, without a question to anybody. [I/O]

Its host key is taken on first sight and kept in a file of the caller's: guests come and go under
the same address, and the user's own known_hosts must not learn of them.
"""

import re
from dataclasses import dataclass
from pathlib import Path
from shlex import quote

from homenode.errors import ToolError, UsageError
from homenode.measure.access.machine import Said
from homenode.process import run
from homenode.ssh_options import CLOSED

_ADDRESS = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.:%-]{0,255}\Z", re.ASCII)
_USER = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,63}\Z", re.ASCII)
_CONNECT_S = 10
_ALIVE_S = 15
_GRACE_S = 30.0
_CAUSES = (
    (
        "Permission denied",
        "does it have this user's key? --ssh-user, --ssh-key; a key with a "
        "passphrase must be in ssh-agent",
    ),
    ("Host key verification failed", "another machine answers at this address"),
    ("REMOTE HOST IDENTIFICATION HAS CHANGED", "another machine answers at this address"),
    ("Connection refused", "is sshd running in it? --ssh-port"),
    ("No route to host", "does the guest have this address? --address"),
    ("timed out", "does the guest have this address? --address"),
)


@dataclass(frozen=True, slots=True)
class SshChannel:
    """See machine.channel.Channel. Each script is a connection of its own.

    key: a private key's file; None = what ssh has by itself. known_hosts: whose file may be
    written. Raises UsageError for what is no address, user or port.
    """

    address: str
    user: str
    known_hosts: Path
    port: int = 22
    key: Path | None = None

    def __post_init__(self) -> None:
        if not _ADDRESS.match(self.address):
            raise UsageError(f"--address: expected a host or an address, found {self.address!r}")
        if not _USER.match(self.user):
            raise UsageError(f"--ssh-user: expected a user's name, found {self.user!r}")
        if not 0 < self.port < 65536:
            raise UsageError(f"--ssh-port: expected 1 to 65535, found {self.port}")

    @property
    def name(self) -> str:
        return f"{self.user}@{self.address} over ssh"

    @property
    def most_input_bytes(self) -> int | None:
        return None

    def close(self) -> None:
        """Nothing stays open between scripts."""

    def execute(self, script: str, timeout_s: float, input: str | None = None) -> Said:
        done = run(
            (*self._argv(), f"sh -c {quote(script)}"), timeout_s + _CONNECT_S + _GRACE_S, input
        )
        if done.returncode == 0:
            return Said(done.stdout, done.stderr)
        said = [line.strip() for line in done.stderr.splitlines() if line.strip()]
        for cause, hint in _CAUSES:
            line = next((line for line in said if cause in line), None)
            if line is not None:
                raise ToolError(f"{self.name}: {line[:200]}", hint=hint)
        raise ToolError(f"{self.name}: {said[-1][:200] if said else done.failure()}")

    def _argv(self) -> tuple[str, ...]:
        options = {
            "BatchMode": "yes",
            "ConnectTimeout": str(_CONNECT_S),
            "ServerAliveInterval": str(_ALIVE_S),
            "ServerAliveCountMax": "4",
            "StrictHostKeyChecking": "accept-new",
            "LogLevel": "ERROR",
            "UserKnownHostsFile": _quoted(self.known_hosts),
            "GlobalKnownHostsFile": "/dev/null",
            "Port": str(self.port),
        }
        if self.key is not None:
            options["IdentitiesOnly"] = "yes"
        given = (word for name, value in options.items() for word in ("-o", f"{name}={value}"))
        key = () if self.key is None else ("-i", str(self.key))
        return ("ssh", *CLOSED, *given, *key, "-l", self.user, "--", self.address)


def _quoted(path: Path) -> str:
    """As ssh's options take a path with blanks in it, and nothing in it for a token of theirs."""
    text = str(path).replace("%", "%%")
    return f'"{text}"' if " " in text else text
