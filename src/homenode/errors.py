"""Errors: reasons that stop a command, with exit code and hint.

Three kinds are distinguished. An error means that the command cannot continue. A Rejection or a
Finding is a requested answer. A Gap is an unknown fact, which is reported while the command
continues.
"""

import errno
from collections.abc import Iterable
from typing import ClassVar

DONE, FINDINGS, USAGE, HOST, UNPLANNABLE, NOT_KNOWN, INTERRUPTED = 0, 1, 2, 3, 4, 5, 130
EXIT_CODES = {
    DONE: "done",
    FINDINGS: "findings",
    USAGE: "usage or bad input",
    HOST: "host or tool failed",
    UNPLANNABLE: "unplannable",
    NOT_KNOWN: "not known",
}
"""Meaning of each exit status of a command; 130 is Ctrl-C, as in any program."""


class HomenodeError(Exception):
    """An error with a message; `hint` is the next step, `reason` the message without the subject.
    `exit_code` is the exit status of a command that ends with this error."""

    exit_code: ClassVar[int] = HOST

    def __init__(self, reason: str, *, hint: str | None = None, subject: str = "") -> None:
        self.message = f"{subject}: {reason}" if subject else reason
        super().__init__(self.message)
        self.reason = reason
        self.hint = hint

    def __str__(self) -> str:
        return self.message if self.hint is None else f"{self.message}\n  hint: {self.hint}"

    @property
    def message_with_hint(self) -> str:
        """Message and hint for a journal or a table, whose cells have no line breaks."""
        return self.message if self.hint is None else f"{self.message}; {self.hint}"


class UsageError(HomenodeError):
    """Contradictory options, or a malformed argument."""

    exit_code = USAGE


def missing(name: str, hint: str) -> UsageError:
    """Return the error for a missing argument or option."""
    kind = "option" if name.startswith("-") else "argument"
    return UsageError(f"missing {kind} {name}", hint=hint)


_MEANT = {"nccl": "multi-gpu", "rccl": "multi-gpu", "stream": "memory-bandwidth"}
"""Objective of each measuring program."""


def find_near(word: str, names: Iterable[str]) -> str | None:
    """Return the name that a word resembles, begins, or means."""
    from difflib import get_close_matches

    names = list(names)
    if _MEANT.get(word) in names:
        return _MEANT[word]
    name_of = {name.lstrip("-"): name for name in names}
    word = word.lstrip("-")
    word = word if word in name_of else word.lower()
    if len(word) == 1:  # a letter resembles too many names
        return None
    longer = [name for name in name_of if word and name.startswith(word)]
    matches = get_close_matches(word, longer or name_of, n=1) or longer
    return name_of[matches[0]] if matches else None


def unknown(
    kind: str, word: str, names: Iterable[str], hint: str | None = None, before: str = ""
) -> UsageError:
    """Return the error for a word that is not one of the names, with the name that it resembles."""
    shown_word = word if word.startswith("-") else repr(word)
    match = find_near(word, names)
    suggestion = f" (did you mean {match}?)" if match else ""
    return UsageError(f"{before}unknown {kind} {shown_word}{suggestion}", hint=hint)


def exclusive(first: str, second: str, hint: str | None = None) -> UsageError:
    """Return the error for two options, or an option and an argument, that exclude each other."""
    return UsageError(f"{first} and {second} cannot be used together", hint=hint)


def requires(option: str, other: str, hint: str | None = None) -> UsageError:
    """Return the error for an option without the option that it requires."""
    return UsageError(f"{option} requires {other}", hint=hint)


def out_of_range(
    option: str, text: str, minimum: float | None, maximum: float | None
) -> UsageError:
    """Return the error for a number out of range; None = no bound on that side."""
    lowest = f"{minimum or 0:.15g}"
    bounds = f"{lowest} or more" if maximum is None else f"{lowest} to {maximum:.15g}"
    return UsageError(f"{option}: {text} is out of range ({bounds})")


class InputError(HomenodeError):
    """An input file or document is invalid."""

    exit_code = USAGE


class NotKnownError(HomenodeError):
    """The question cannot be answered, because a deciding fact is unknown."""

    exit_code = NOT_KNOWN


class ParseError(InputError):
    """A text does not have its format. found: None = the text lacks what is expected."""

    def __init__(
        self,
        source: str,
        expected: str,
        found: str | None = None,
        *,
        line: int | None = None,
        hint: str | None = None,
    ) -> None:
        position = source if line is None else f"{source}:{line}"
        shown_value = found if found is None or len(found) <= 120 else found[:117] + "..."
        missing = shown_value is None
        reason = f"missing {expected}" if missing else f"expected {expected}, found {shown_value!r}"
        super().__init__(reason, hint=hint, subject=position)
        self.source = source
        self.line = line
        self.expected = expected
        self.found = found


class HostError(HomenodeError):
    """The host cannot be read, or cannot perform the request."""

    exit_code = HOST


_NOT_AS_NAMED = {
    errno.ENOENT,
    errno.ENOTDIR,
    errno.EISDIR,
    errno.ENAMETOOLONG,
    errno.ELOOP,
    errno.ENXIO,
    errno.EFBIG,
    errno.EXDEV,
}


def not_found(name: str, kind: str = "file or directory", hint: str | None = None) -> InputError:
    """Return the error for a named file or directory that does not exist."""
    return InputError(f"no such {kind}", hint=hint, subject=name)


def of_os(
    error: OSError | ValueError, name: str, expected: str, hint: str | None = None
) -> HomenodeError:
    """Return the error for a file that could not be opened: its path and purpose.

    A HostError if permission is denied or the disk fails; an InputError if the file does not exist
    or its name is invalid (a ValueError: it contains a NUL).
    """
    reason = getattr(error, "strerror", None) or str(error)
    name = name if len(name) <= 200 else f"{name[:197]}..."
    is_input = isinstance(error, ValueError) or error.errno in _NOT_AS_NAMED
    kind = InputError if is_input else HostError
    if isinstance(error, FileNotFoundError):
        return not_found(name, "file", hint)
    if hint is None and isinstance(error, PermissionError):
        hint = "run as root, or as the owner of the file"
    reason = reason[:1].lower() + reason[1:]
    return kind(f"cannot read {expected}: {reason}", hint=hint, subject=name)


class ToolError(HostError):
    """An external program is missing, failed or ran out of time."""


class NoAnswerError(ToolError):
    """A daemon or tool did not answer. The outcome of the request is unknown; retry later."""
