"""RunMark: which run of a domain this is, where libvirt's number alone does not say. [I/O]

libvirt counts on from the highest number of a domain that runs when the daemon is started: from 1
after a boot of the host, and where nothing ran. Seen with libvirt 9.0.
"""

from collections.abc import Iterator
from pathlib import Path

from homenode.verify.live.procfs import arguments_after

_START = 19
"""Of the fields behind the name in /proc/PID/stat: when it began, in ticks. Source: proc(5)."""


def run_mark(uuid: str, root: str = "/") -> str | None:
    """The boot of this machine and the domain's QEMU in it, in a word that no other run has.

    None where no process here is that domain's, or none may be seen.
    """
    proc = Path(root) / "proc"
    boot = _text(proc / "sys/kernel/random/boot_id").strip()
    # A process may say of itself what it likes; the first to have said it is QEMU.
    found = min(_processes(proc, uuid), default=None)
    return None if found is None or not boot else f"{boot}:{found[1]}:{found[0]}"


def _processes(proc: Path, uuid: str) -> Iterator[tuple[int, int]]:
    """(start in ticks, number) of each process with that UUID on its command line."""
    for folder in proc.iterdir() if proc.is_dir() else ():
        argv = _text(folder / "cmdline").split("\0") if folder.name.isdecimal() else []
        if uuid in arguments_after(argv, "-uuid"):
            fields = _text(folder / "stat").rpartition(")")[2].split()
            if len(fields) > _START and fields[_START].isdecimal():
                yield int(fields[_START]), int(folder.name)


def _text(path: Path) -> str:
    try:
        return path.read_text("utf-8", "replace")
    except OSError:  # it has ended, or is not for us to see
        return ""
