"""Names that others choose: what shells, YAML, systemd, Slurm and command lines would take for
more than a name."""

import shutil
import subprocess
from pathlib import Path

NAMES = (
    *("a b", " a ", "a\tb", "a\nb", "a\r\nb", "a\nexec id\n", "# a", "a: b", "- a", ""),
    *"--overwrite -n - -- --help=x a'b a\"b a`id` $(id) ${PATH} $PATH a;id a&id a|id a>b".split(),
    *r"a<b a#b a=b NodeName=b a,b a\ a\nb * ? ~ ~root [ab] gpu[1-3] [0]=x {a,b} (a) a)b".split(),
    *"esac done a: !a &a *a %i a%sb @a ../a /etc/a .. . null true 1e3 0x10 7 DEFAULT ALL".split(),
    *("localhost", "\x1b[31m", "\x00", "\u202eb", "a\u2028b", "a\x85b", "é", "😀\x1b", "a" * 1000),
    *("<b>&amp;", "a\udcffb"),
)

ENCODED = [name for name in NAMES if "\udcff" not in name]
SHELL_NAMES = [name for name in ENCODED if "\0" not in name]


def run_shell(
    script: Path, *words: str, shell: str = "bash", stubs: Path, **variables: str
) -> list[list[str]]:
    """The commands that a script runs, of programs of which there are only stand-ins."""
    log = stubs / "log"
    log.write_bytes(b"")
    subprocess.run(
        [shutil.which(shell) or shell, str(script), *words],
        env={"PATH": str(stubs), **variables},
        check=True,
        capture_output=True,
    )
    calls = log.read_bytes().decode().split("\1")[:-1]
    return [call.split("\0")[:-1] for call in calls]


def stub(directory: Path, *names: str) -> Path:
    """A directory of programs that only write down what they were called with."""
    directory.mkdir(exist_ok=True)
    for name in names:
        path = directory / name
        path.write_text(
            f"#!/bin/sh\nprintf '%s\\0' {name} \"$@\" >>{directory}/log\n"
            f"printf '\\1' >>{directory}/log\n"
        )
        path.chmod(0o755)
    return directory
