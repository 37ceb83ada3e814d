"""WhyText: the answer to a paste on one screen."""

from collections.abc import Iterator

from homenode.doc import Doc, Part, Span, Text, Words
from homenode.findings import Severity
from homenode.why.answer import LikelyCause, PasteAnswer
from homenode.why.message import Sure

_LOOKS = {Severity.CRITICAL: "critical", Severity.WARNING: "warn"}
_MOST_READ = 6
_MOST_LETTERS = 200
_INDENT = 2


def why_text(said: PasteAnswer) -> Doc:
    """The likeliest cause with its line, what to do, what would confirm it, what to send next."""
    parts: list[Part] = [Text(("read: ", *_read(said)), "dim")]
    parts += [
        Text(f"not read: {one.subject}: {_short(one.reason)}", "dim") for one in said.gaps[:2]
    ]
    parts.append(Text(""))
    causes = (*said.causes, *said.worth_knowing)
    if not causes and said.sure is Sure.NOT_ENOUGH:
        parts.append(
            Text((Span("not enough: ", "bold"), "nothing here is of a kind that is known"))
        )
    elif not said.causes:
        parts.append(Text(Span("nothing in this shows a fault", "bold")))
    if causes:
        parts += _first(causes[0])
    parts.append(_row("send next", said.send))
    if causes[1:]:
        parts += [Text(""), Text("also in it:", "dim"), *map(_other, causes[1:])]
    return Doc("", tuple(parts))


def _read(said: PasteAnswer) -> tuple[str, ...]:
    if not said.read:
        return ("messages only",)
    named = [
        f"{one.what} ({one.where}{f', {one.lines} lines' if one.lines else ''})"
        for one in said.read[:_MOST_READ]
    ]
    more = len(said.read) - len(named)
    return ("; ".join(named) + (f" and {more} more" if more else ""),)


def _first(cause: LikelyCause) -> Iterator[Part]:
    found = cause.finding
    look = _LOOKS.get(found.severity, "bold")
    if cause.sure is Sure.NOT_ENOUGH:
        yield Text((Span("not enough: ", "bold"), cause.cause))
    else:
        word = _word(cause)
        yield Text((Span(f"{word}: ", look), Span(cause.cause, "bold"), f"  ({found.id})"))
        if word == cause.sure:
            yield Text(f"({word} = {cause.sure.meaning})", "dim", indent=_INDENT)
    if cause.shown_by is not None:
        yield _row("shown by", cause.shown_by)
    else:
        yield _row(
            "shown by", f"{found.subject}: found {found.observed}, expected {found.expected}"
        )
    if found.fix is not None:
        yield _row("change", found.fix)
    if cause.confirm is not None:
        yield _row("confirm", cause.confirm)


def _word(cause: LikelyCause) -> str:
    is_cause = cause.finding.is_bad or cause.sure is Sure.NOT_ENOUGH
    return cause.sure if is_cause else "worth knowing"


def _row(name: str, text: str) -> Text:
    return Text((Span(f"{name:10}", "hint"), _short(text, 2 * _MOST_LETTERS)), indent=_INDENT)


def _other(cause: LikelyCause) -> Text:
    found = cause.finding
    words: Words = (
        Span(f"{_word(cause)}: ", _LOOKS.get(found.severity, "dim")),
        _short(f"{cause.cause} {found.subject}"),
        f" ({found.id})",
    )
    return Text(words, indent=_INDENT)


def _short(text: str, most: int = _MOST_LETTERS) -> str:
    return text if len(text) <= most else text[: most - 1] + "…"
