"""ConfigFiles: Slurm's configuration as it lies in a folder, with what it includes. [I/O]

An Include line is followed to files in the folder of the file that the user named, and below it:
what another folder of this machine holds need not be the cluster's, and is not the user's choice.
"""

from pathlib import Path

from homenode.cluster.slurm.config import MAX_TEXT_CHARS, Config, ConfigFile, parse_config
from homenode.input_files import read_below, read_file

_MOST_BYTES = 4 * MAX_TEXT_CHARS


def read_config(path: Path) -> Config:
    """A configuration file and those that it includes.

    Raises InputError for a file that cannot be read, ParseError that names a line.
    """
    folder = path.parent

    def include(name: str, neighbours: str) -> tuple[ConfigFile, ...] | str:
        # As Slurm does: next to the file that has the line; an absolute name stays as it is.
        other = Path(neighbours).parent / name
        try:
            others = sorted(other.parent.glob(other.name)) if "*" in name else [other]
            top = folder.resolve()
            if not all(one.resolve().is_relative_to(top) for one in [other, *others]):
                return f"it lies outside the folder of {path.name}"
            if not others or not all(one.is_file() for one in others):
                return "there is no such file"
            return tuple(ConfigFile(str(one), _included(top, one)) for one in others)
        except OSError as error:
            return f"{error.strerror}"
        except (ValueError, RuntimeError) as error:  # a name with a NUL, links in a circle
            return str(error)

    content = read_file(path, "a configuration file of Slurm", most=_MOST_BYTES)
    return parse_config(content.decode("utf-8", "replace"), str(path), include)


def _included(top: Path, path: Path) -> str:
    inside = path.resolve().relative_to(top)
    return read_below(top, str(inside), _MOST_BYTES).decode("utf-8", "replace")
