"""Shell: a program's run as a script for a POSIX shell far away, and what came of it.

Only sh and the standard tools are counted on. The script gives the exit status on standard error,
after a mark that nothing else can say: how a connection ended says nothing of the program.
"""

import re
from collections.abc import Collection, Mapping, Sequence
from shlex import quote

MISSING = "missing"
"""In the place of a status: the program is not installed there."""

PATHS = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_STATUS = re.compile(r"(\d{1,3}|missing)\Z")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*\Z", re.ASCII)
_PRELUDE = f"PATH=$PATH:{PATHS}; LC_ALL=C; export PATH LC_ALL; "


def run_script(
    argv: Sequence[str],
    timeout_s: float,
    mark: str,
    environment: Mapping[str, str] | None = None,
    stdin: str | None = None,
) -> str:
    """A line that runs a program and then says mark and status on standard error.

    stdin: a file there to feed it; None = the script's own standard input. Where there is a
    `timeout`, it ends the program there too.

    >>> run_script(["echo", "a b"], 5, "M").startswith("PATH=")
    True
    """
    variables = "".join(
        f"{name}={quote(value)}; export {name}; " for name, value in (environment or {}).items()
        if _VARIABLE.match(name)
    )  # fmt: skip
    words = " ".join(map(quote, argv))
    fed = "" if stdin is None else f" <{quote(stdin)}"
    seconds = max(1, round(timeout_s))
    return (
        f"{_PRELUDE}{variables}"
        f"if command -v {quote(argv[0])} >/dev/null 2>&1; then "
        "if command -v timeout >/dev/null 2>&1; "
        f"then timeout -s KILL {seconds} {words}{fed}; else {words}{fed}; fi; r=$?; "
        f"else r={MISSING}; fi; "
        f'printf "\\n%s %s\\n" {quote(mark)} "$r" >&2'
    )


def installed_script(names: Collection[str]) -> str:
    """A line that prints each name of which a program is there."""
    words = " ".join(quote(name) for name in sorted(names))
    return f'{_PRELUDE}for n in {words}; do command -v "$n" >/dev/null 2>&1 && echo "$n"; done; :'


def status_of(stderr: str, mark: str) -> tuple[str, str | None]:
    """Standard error without the mark, and the status behind it; None where the mark never came.

    >>> status_of("warning\\n\\nM 3\\n", "M")
    ('warning\\n', '3')
    """
    text, found, status = stderr.rpartition(f"\n{mark} ")
    if not found or not _STATUS.match(status.strip()):
        return stderr, None
    return text, status.strip()


def returncode_of(status: int) -> int:
    """As Completed has it: a shell gives a death by signal as 128 and the signal's number.

    >>> returncode_of(3), returncode_of(137)
    (3, -9)
    """
    return 128 - status if 128 < status <= 128 + 64 else status


def octal_script(content: bytes) -> str:
    """Lines that print the content, for a shell without any decoder: each byte takes 4 letters.

    >>> octal_script(b"a")
    "printf '\\\\141'\\n"
    """
    return "".join(
        "printf '" + "".join(f"\\{byte:03o}" for byte in content[at : at + 256]) + "'\n"
        for at in range(0, len(content), 256)
    )
