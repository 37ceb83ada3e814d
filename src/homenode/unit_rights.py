"""Rights of systemd units: what a unit of ours is left with, as lines of its [Service].

Source: systemd.exec(5), systemd.resource-control(5); what each line is worth: systemd-analyze(1),
security. Versions that do not know a line leave it out with a warning.
"""

OF_ALL_UNITS = (
    "UMask=0077",
    "ProtectSystem=strict",  # but for /dev, /proc and /sys: units write to /sys
    "DevicePolicy=closed",
    "ProtectKernelModules=yes",
    "ProtectKernelLogs=yes",
    "ProtectControlGroups=yes",
    "ProtectClock=yes",
    "ProtectHostname=yes",
    "NoNewPrivileges=yes",
    "SystemCallFilter=@system-service",
    "SystemCallFilter=~@privileged @resources @mount",
    "SystemCallErrorNumber=EPERM",
    "SystemCallArchitectures=native",
    "RestrictAddressFamilies=AF_UNIX",
    "IPAddressDeny=any",
    "RestrictNamespaces=yes",
    "RestrictRealtime=yes",
    "RestrictSUIDSGID=yes",
    "LockPersonality=yes",
    "MemoryDenyWriteExecute=yes",
)


def unit_rights(*capabilities: str, home: str = "yes") -> tuple[str, ...]:
    """The lines. home: of ProtectHome=, "read-only" where the program may lie in one.

    SYS_ADMIN is asked for by the kernel to read more than 64 bytes of a device's configuration
    space, and SYS_PTRACE with DAC_READ_SEARCH to see which files other users' processes have open.
    """
    bounds = " ".join(f"CAP_{one}" for one in capabilities)
    return (*OF_ALL_UNITS, f"ProtectHome={home}", f"CapabilityBoundingSet={bounds}")
