"""virsh version and qemu-system-x86_64 --version: versions of the hypervisor.

    Using library: libvirt 9.0.0
    Using API: QEMU 9.0.0
    Running hypervisor: QEMU 7.2.22

    QEMU emulator version 7.2.22 (Debian 1:7.2+dfsg-7+deb12u18)

Seen with libvirt 6.0 to 11.3 and QEMU 4.2 to 10.0, also as qemu-kvm of RHEL. Source: tools/
virsh-host.c of libvirt; softmmu/vl.c of QEMU.
"""

import re

from homenode.errors import ParseError

Version = tuple[int, int, int]
"""(major, minor, micro)."""

_NUMBERS = r"(\d{1,4})\.(\d{1,4})(?:\.(\d{1,4}))?"
_VIRSH_LINE = re.compile(rf"([A-Z][A-Za-z ]+): (?:([A-Za-z]+) )?{_NUMBERS}\s*", re.ASCII)
_QEMU_LINE = re.compile(rf"QEMU emulator version {_NUMBERS}(?:\D.*)?", re.ASCII)
_KEYS = (
    "Compiled against library",  # of the client's build, not of the daemon
    "Using library",
    "Using API",  # the driver, numbered as the library
    "Running hypervisor",
    "Running against daemon",  # virsh version --daemon; a number alone
)


def parse_virsh_version(text: str) -> tuple[Version, Version | None]:
    """Return libvirt's version (the daemon's, if it differs) and QEMU's. Raises ParseError."""
    versions: dict[str, Version] = {}
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        match = _VIRSH_LINE.fullmatch(line)
        if match is None or match[1] not in _KEYS:
            raise ParseError("virsh version", f"one of {', '.join(_KEYS)}", line, line=number)
        if match[1] != "Running hypervisor" or match[2] == "QEMU":
            versions[match[1]] = _build_version(match, 3)
    if "Using library" not in versions:
        raise ParseError("virsh version", "a line 'Using library'", text.strip()[:80])
    libvirt = versions.get("Running against daemon", versions["Using library"])
    return libvirt, versions.get("Running hypervisor")


def parse_qemu_version(text: str) -> Version:
    """Return the version of QEMU's first line; a copyright follows. Raises ParseError."""
    line = text.lstrip("\n").partition("\n")[0].rstrip()
    match = _QEMU_LINE.fullmatch(line)
    if match is None:
        raise ParseError("qemu --version", "QEMU emulator version 7.2.22", line, line=1)
    return _build_version(match, 1)


def _build_version(match: "re.Match[str]", first: int) -> Version:
    return int(match[first]), int(match[first + 1]), int(match[first + 2] or 0)
