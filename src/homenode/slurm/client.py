"""Client: Slurm's own programs, run with the user's configuration. [I/O]"""

import os
import re
from collections.abc import Sequence

from homenode.errors import ToolError
from homenode.process import Completed, ToolTimeoutError, run

_TIMEOUT_S = 90.0
"""Longer than Slurm's own MessageTimeout of a busy controller."""

_PASSING = re.compile(
    r"Unable to contact slurm controller|Socket timed out|Connection refused|timed out|"
    r"temporarily unable|Zero Bytes were transmitted|Connection reset|backup controller|"
    r"Slurm backup|Unexpected message received|Transport endpoint|send/recv",
    re.IGNORECASE,
)


def will_pass(error: str) -> bool:
    """True where Slurm did not answer, and may later; False where it said no."""
    return _PASSING.search(error) is not None


class NoAnswerError(ToolError):
    """The controller did not answer. It may, later: nothing is known of what was asked."""


def ask(
    argv: Sequence[str],
    environment: dict[str, str] | None = None,
    kept_open: tuple[int, ...] = (),
) -> str:
    """What a program of Slurm's prints. Raises NoAnswerError, and ToolError with Slurm's reason."""
    environment = {**_configuration(), **(environment or {})}
    try:
        done = run(argv, _TIMEOUT_S, environment=environment, kept_open=kept_open)
    except ToolTimeoutError as error:
        raise NoAnswerError(error.message) from None
    if done.returncode != 0 and will_pass(done.stderr):
        raise NoAnswerError(_said(done))
    if done.returncode != 0:
        hint = None
        if "configuration" in done.stderr.lower():
            hint = "run it where Slurm's commands work: SLURM_CONF names another slurm.conf"
        raise ToolError(_said(done), hint=hint)
    return done.stdout


def _said(done: Completed) -> str:
    """Slurm's errors: the last shows what failed, those before it which limit it was."""
    lines = [line.strip() for line in done.stderr.splitlines() if line.strip()]
    errors = [line.partition("error: ")[2] for line in lines if "error: " in line]
    if errors:
        return f"{done.argv[0]}: error: {'; '.join(dict.fromkeys(errors[-3:]))[:300]}"
    if not lines:
        return str(done.failure())
    return f"{done.argv[0]}: {lines[-1].removeprefix(f'{done.argv[0]}: ')[:300]}"


def _configuration() -> dict[str, str]:
    return {name: os.environ[name] for name in ("SLURM_CONF",) if name in os.environ}
