"""Ssh: a channel to a guest by OpenSSH, without prompts. [I/O]

Its host key is stored at the first login in a file of the caller, under the guest's own name:
guests share addresses over time, and the user's known_hosts must not contain them. Later logins
must show this key, in every boot and at any address.
"""

import re
from pathlib import Path

from msgspec import Struct

from homenode.errors import ToolError, UsageError, out_of_range
from homenode.measure.access.machine import ScriptOutput
from homenode.measure.access.remote import format_sh_line
from homenode.process import CLOSED, run
from homenode.safe.durable import replace_file
from homenode.safe.input_files import read_start
from homenode.text import command_line

_ADDRESS = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.:%-]{0,255}\Z", re.ASCII)
_USER = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,63}\Z", re.ASCII)
_CONNECT_S = 30  # a guest whose vCPUs all measure may answer late
_ALIVE_S = 15
_GRACE_S = 30.0
_LOST = "the guest may have restarted or ended: check its console"
_CAUSES = (
    (
        "Permission denied",
        "does it have this user's key? --ssh-user, --ssh-key; a key with a "
        "passphrase must be in ssh-agent",
    ),
    ("Connection refused", "is sshd running in it? --ssh-port"),
    ("No route to host", "does the guest have this address? --address"),
    ("timed out", "does the guest have this address? --address"),
    ("send disconnect", _LOST),
    ("closed by remote host", _LOST),
)
_OTHER_KEY = ("Host key verification failed", "REMOTE HOST IDENTIFICATION HAS CHANGED")
_FINGERPRINT = re.compile(r"SHA256:[A-Za-z0-9+/]{43}")
_OWN_FAILURE = 255
"""ssh's exit status if it did not come to run anything, or lost the connection."""

_MAX_KEYS_BYTES = 1 << 20


class HostKeyError(ToolError):
    """The host key differs: another machine than the measured machine answers."""


class SshChannel(Struct, frozen=True):
    """See access.machine.Channel. Each script is a connection of its own."""

    address: str
    user: str
    known_hosts: Path  # homenode's file of host keys
    port: int = 22
    key: Path | None = None  # a private key's file; None = ssh's default
    # expected owner of the host key; None = the address. Raises UsageError for an invalid address,
    # user or port.
    guest: str | None = None

    def __post_init__(self) -> None:
        if not _ADDRESS.match(self.address):
            raise UsageError(f"--address: expected a host or an address, found {self.address!r}")
        if not _USER.match(self.user):
            raise UsageError(f"--ssh-user: expected a user's name, found {self.user!r}")
        if not 0 < self.port < 65536:
            raise out_of_range("--ssh-port", str(self.port), 1, 65535)

    @property
    def name(self) -> str:
        return f"{self.user}@{self.address} over ssh"

    @property
    def most_input_bytes(self) -> int | None:
        return None

    def close(self) -> None:
        """Nothing stays open between scripts."""

    def execute(self, script: str, timeout_s: float, input: str | None = None) -> ScriptOutput:
        is_known = self._is_known()
        argv = (*self._build_argv(is_known=is_known), format_sh_line(script))
        result = run(argv, timeout_s + _CONNECT_S + _GRACE_S, input)
        if result.returncode == 0:
            return ScriptOutput(result.stdout, result.stderr)
        if result.returncode == _OWN_FAILURE and not is_known:
            self._forget()  # a machine that rejects the login is not the guest
        if any(cause in result.stderr for cause in _OTHER_KEY):
            raise self._make_key_error(result.stderr)
        errors = [line.strip() for line in result.stderr.splitlines() if line.strip()]
        for cause, hint in _CAUSES:
            line = next((line for line in errors if cause in line), None)
            if line is not None:
                raise ToolError(f"{self.name}: {line[:200]}", hint=hint)
        if result.returncode == _OWN_FAILURE and not errors:
            raise ToolError(
                f"{self.name}: expected the script to end, found the connection closed",
                hint=_LOST,
            )
        raise ToolError(f"{self.name}: {errors[-1][:200] if errors else result.failure()}")

    def _make_key_error(self, stderr: str) -> HostKeyError:
        fingerprint = _FINGERPRINT.search(stderr)
        forget = command_line("ssh-keygen", "-R", self._key_name, "-f", self.known_hosts)
        return HostKeyError(
            f"{self.name}: expected the host key of the first login, found "
            f"{'another key' if fingerprint is None else fingerprint[0]}",
            hint="another machine answers at this address, or the guest has new keys: compare them "
            f"on its console; {forget} forgets the old one; a guest that makes new keys at each "
            "boot is reached with --guest-access agent",
        )

    @property
    def _key_name(self) -> str:
        return self.guest or f"[{self.address}]:{self.port}"

    def _read_lines(self) -> list[bytes]:
        try:
            return read_start(self.known_hosts, _MAX_KEYS_BYTES).splitlines(keepends=True)
        except FileNotFoundError:
            return []
        except OSError as error:
            raise ToolError(f"{self.known_hosts}: expected host keys, found: {error}") from None

    def _is_key_of_it(self, line: bytes) -> bool:
        return line.split()[:1] == [self._key_name.encode()]

    def _is_known(self) -> bool:
        return any(map(self._is_key_of_it, self._read_lines()))

    def _forget(self) -> None:
        lines = self._read_lines()
        other_lines = [line for line in lines if not self._is_key_of_it(line)]
        if len(other_lines) < len(lines):
            try:
                replace_file(self.known_hosts, b"".join(other_lines))
            except OSError as error:
                raise ToolError(f"{self.known_hosts}: cannot write: {error}") from None

    def _build_argv(self, *, is_known: bool) -> tuple[str, ...]:
        options = {
            "BatchMode": "yes",
            "ConnectTimeout": str(_CONNECT_S),
            "ServerAliveInterval": str(_ALIVE_S),
            "ServerAliveCountMax": "4",
            # For accept-new, a known guest's key of another kind were a new one too.
            "StrictHostKeyChecking": "yes" if is_known else "accept-new",
            "HostKeyAlias": self._key_name,
            "CheckHostIP": "no",
            "HashKnownHosts": "no",
            "UpdateHostKeys": "no",
            "VerifyHostKeyDNS": "no",
            # An existing connection has the key of its original host.
            "ControlPath": "none",
            "LogLevel": "ERROR",
            "UserKnownHostsFile": _quote(self.known_hosts),
            "GlobalKnownHostsFile": "/dev/null",
            "Port": str(self.port),
        }
        if self.key is not None:
            options["IdentitiesOnly"] = "yes"
        words = (word for name, value in options.items() for word in ("-o", f"{name}={value}"))
        key = () if self.key is None else ("-i", str(self.key))
        return ("ssh", *CLOSED, *words, *key, "-l", self.user, "--", self.address)


def _quote(path: Path) -> str:
    """Quote a path with blanks for ssh's options, without their tokens."""
    text = str(path).replace("%", "%%")
    return f'"{text}"' if " " in text else text
