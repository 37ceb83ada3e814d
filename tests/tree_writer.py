"""Writes a snapshot as files and links, for tools that read /sys below a root. [I/O]"""

from pathlib import Path

from homenode.machine.snapshot.protocol import MemorySnapshot


def write_tree(snapshot: MemorySnapshot, directory: Path) -> None:
    """Writes every file and link below a directory, which must be new or empty.

    lstopo reads it with HWLOC_FSROOT=directory; tool outputs are in commands/NAME, where
    machine/snapshot/store.py looks for them.
    """
    for parent in {path.rpartition("/")[0] for path in (*snapshot.files, *snapshot.links)}:
        (directory / parent.lstrip("/")).mkdir(parents=True, exist_ok=True)
    top = str(directory)
    for path, text in snapshot.files.items():
        # Thousands of tiny files: a Path for each would take as long as writing it.
        with open(top + path, "xb", buffering=0) as file:  # noqa: PTH123
            file.write(text.encode("utf-8", "surrogateescape"))
    for name, output in snapshot.commands.items():
        (directory / "commands").mkdir(exist_ok=True)
        with (directory / "commands" / name).open("x", encoding="utf-8") as text_file:
            text_file.write(output)
    for path, target in snapshot.links.items():
        (directory / path.lstrip("/")).symlink_to(target)
