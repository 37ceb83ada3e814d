"""Writes a snapshot as a folder of files and links, for tools that read /sys below a root. [I/O]"""

from pathlib import Path

from homenode.machine.snapshot.memory import MemorySnapshot


def write_tree(snapshot: MemorySnapshot, folder: Path) -> None:
    """Writes every file and link below a folder, which must be new or empty.

    lstopo reads it with HWLOC_FSROOT=folder; tool outputs are in commands/NAME, where
    machine/snapshot/live.py looks for them.
    """
    for parent in {path.rpartition("/")[0] for path in (*snapshot.files, *snapshot.links)}:
        (folder / parent.lstrip("/")).mkdir(parents=True, exist_ok=True)
    top = str(folder)
    for path, text in snapshot.files.items():
        # Thousands of tiny files: a Path for each would take as long as writing it.
        with open(top + path, "xb", buffering=0) as file:  # noqa: PTH123
            file.write(text.encode("utf-8", "surrogateescape"))
    for name, output in snapshot.commands.items():
        (folder / "commands").mkdir(exist_ok=True)
        with (folder / "commands" / name).open("x", encoding="utf-8") as text_file:
            text_file.write(output)
    for path, target in snapshot.links.items():
        (folder / path.lstrip("/")).symlink_to(target)
