"""Command: words of a command line, read into the record of a command's options. [I/O]

A record is a msgspec Struct. Each field that can be typed has an Opt, a Flag or an Arg in its
annotation; a field that is a record itself brings its own fields along.
"""

import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import copy
from enum import StrEnum
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple, cast

from msgspec import NODEFAULT

from homenode.errors import HostError, UsageError
from homenode.option import Arg, Flag, Opt

HELP = ("--help", "-h")
HELP_ALL = "--help-all"
EXAMPLES = "Examples:"
OPTIONS = "Options:"
"""Sections of a record's docstring."""
REQUIRED = NODEFAULT
"""The default of a field that has none."""


class WrongCall(UsageError):
    """A call that no command takes. path: the words that call the command. group: where only its
    name was given, whose help is the answer."""

    def __init__(
        self, path: str, message: str, hint: str = "", group: "Command | None" = None
    ) -> None:
        super().__init__(message, hint=f"{hint}{path} --help")
        self.path = path
        self.group = group


class Only:
    """In the annotation of a record: fields, or panels, that this command offers alone."""

    def __init__(self, *names: str) -> None:
        self.names = names

    def takes(self, name: str, panel: str) -> bool:
        return name in self.names or panel in self.names


class Under:
    """In the annotation of a record: the panel of its options, and whether all of them are rare."""

    def __init__(self, panel: str, *, rare: bool = False) -> None:
        self.panel, self.rare = panel, rare

    def of(self, one: "Parameter") -> "Parameter":
        opt = copy(one.opt)
        opt.panel, opt.rare = self.panel, self.rare or opt.rare
        return one._replace(opt=opt)


class Parameter(NamedTuple):
    """A field that can be typed."""

    path: tuple[str, ...]  # the fields that lead to it
    opt: Opt
    kind: Any
    many: bool  # it may be repeated
    default: Any
    record: Any = None  # the one that has the field

    @property
    def help(self) -> str:
        """What it does, then its values, then "Default:" if the field's own value is none."""
        return option_helps(self.record).get(self.path[-1]) or self.opt.help

    @property
    def name(self) -> str:
        """What messages call it."""
        return self.opt.names[0] if self.opt.names else self.opt.metavar

    @property
    def choices(self) -> tuple[str, ...]:
        kinds = self.kind.__args__ if isinstance(self.kind, types.UnionType) else (self.kind,)
        if self.opt.parse is not None or not _is_enumeration(kinds[0]):
            return ()
        return tuple(str(one) for kind in kinds for one in kind)

    def value(self, text: str, name: str) -> Any:
        """What a word means. Raises UsageError, or what the field's parser raises."""
        if self.opt.parse is not None:
            return self.opt.parse(text, name)
        if self.choices:
            return self._chosen(text, name)
        if self.kind in (int, float):
            return self._number(text, name)
        return Path(text) if self.kind is Path else text

    def _chosen(self, text: str, name: str) -> Any:
        if text not in self.choices:
            from homenode.text import did_you_mean

            raise UsageError(
                f"{name}: expected one of {', '.join(self.choices)}, found {text!r}",
                hint=did_you_mean(text, self.choices),
            )
        kinds = self.kind.__args__ if isinstance(self.kind, types.UnionType) else (self.kind,)
        return next(kind(text) for kind in kinds if text in list(kind))

    def _number(self, text: str, name: str) -> Any:
        least, most = self.opt.ge, self.opt.le
        try:
            number = self.kind(text)
        except ValueError:
            what = "a whole number" if self.kind is int else "a number"
            raise UsageError(f"{name}: expected {what}, found {text!r}") from None
        if not (least is None or number >= least) or not (most is None or number <= most):
            bounds = f"{least:g} or more" if most is None else f"{least or 0:g} to {most:g}"
            raise UsageError(f"{name}: expected {bounds}, found {text}")
        return number


def _is_enumeration(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, StrEnum)


def parameters_of(record: Any, path: tuple[str, ...] = ()) -> Iterator[Parameter]:
    """What can be typed of a record, in the order of its fields."""
    annotations: dict[str, Any] = {}
    for base in reversed(record.__mro__):
        annotations |= vars(base).get("__annotations__", {})
    names, defaults = record.__struct_fields__, record.__struct_defaults__
    given = dict(zip(names[len(names) - len(defaults) :], defaults, strict=True))
    for name in names:
        annotation = annotations[name]
        about = getattr(annotation, "__metadata__", ())
        base = annotation.__origin__ if about else annotation
        if _is_record(annotation):
            limits = [one for one in about if isinstance(one, Only)]
            under = [one for one in about if isinstance(one, Under)]
            for one in parameters_of(base, (*path, name)):
                if all(limit.takes(one.path[-1], one.opt.panel) for limit in limits):
                    yield under[0].of(one) if under else one
            continue
        for opt in about:
            if isinstance(opt, Opt):
                kind, many = _kind_of(base)
                default = given.get(name, NODEFAULT)
                yield Parameter((*path, name), opt, kind, many, default, record)


@cache
def option_helps(record: Any) -> dict[str, str]:
    """What the options of a record do, by field: the lines behind "Options:" in its docstring."""
    _, _, section = (record.__doc__ or "").partition(f"\n    {OPTIONS}\n")
    helps: dict[str, str] = {}
    name = ""
    for line in section.partition("\n\n")[0].splitlines():
        if line.startswith("        "):
            helps[name] += f" {line.strip()}"
        elif line.strip():
            name, _, text = line.strip().partition(": ")
            helps[name] = text
    return helps


def _is_record(annotation: Any) -> bool:
    """Whether a field brings fields of its own: a record that is not itself typed as one word."""
    about = getattr(annotation, "__metadata__", ())
    base = annotation.__origin__ if about else annotation
    return hasattr(base, "__struct_fields__") and not any(isinstance(one, Opt) for one in about)


def _kind_of(annotation: Any) -> tuple[Any, bool]:
    """The type of one value, and whether the field has several."""
    if isinstance(annotation, types.UnionType):
        rest = [one for one in annotation.__args__ if one is not types.NoneType]
        annotation = rest[0]
        for one in rest[1:]:
            annotation = annotation | one
    many = getattr(annotation, "__origin__", None) is tuple and ... in annotation.__args__
    kind = annotation.__args__[0] if many else annotation
    return getattr(kind, "__supertype__", kind), many


def as_words(record: Any) -> tuple[str, ...]:
    """The options of a record that are not as by default, as they are typed."""
    words: list[str] = []
    for one in parameters_of(type(record)):
        value = record
        for name in one.path:
            value = getattr(value, name)
        if value == one.default:
            continue
        if isinstance(value, bool):
            words.append(one.name)
            continue
        for part in value if one.many else (value,):
            words += [one.name, one.opt.show(part)]
    return tuple(words)


class Command(NamedTuple):
    """A command, a group of commands, or both."""

    name: str
    record: str = ""  # "module:name" below homenode.cli, or ".module:name" beside it
    work: str = ""  # "module:name" below homenode.cli, or ".module:name" beside it
    panel: str = "Commands"
    about: str = ""  # the help of a group; a command's is its record's docstring
    commands: "tuple[Command, ...]" = ()
    hidden: bool = False
    room: str = ""  # where the whole of a group is, which is imported when its name is typed

    def whole(self) -> "Command":
        """The command with what its room has. Raises HostError where the room is not installed."""
        if not self.room:
            return self
        room = f"homenode.{self.room.split('.')[1]}"
        try:
            return cast(Command, _loaded(self.room))
        except ModuleNotFoundError as error:
            if error.name not in (room, f"{room}.commands"):
                raise
            raise HostError(
                f"{self.name}: this installation has no {room}",
                hint="pip install --force-reinstall homenode",
            ) from None

    @property
    def help(self) -> str:
        text = self.about or (self.load().__doc__ or "" if self.record else "")
        before, _, section = text.partition(f"    {OPTIONS}\n")
        return before + section.partition("\n\n")[2]

    @property
    def examples(self) -> tuple[str, ...]:
        """The commands that its help ends with."""
        _, _, after = self.help.partition(EXAMPLES)
        lines = after.replace("\\\n", " ").splitlines()
        return tuple(" ".join(line.split()) for line in lines if line.strip())

    @property
    def parameters(self) -> tuple[Parameter, ...]:
        return tuple(parameters_of(self.load())) if self.record else ()

    @property
    def subcommands(self) -> "Mapping[str, Command]":
        return {one.name: one for one in self.commands}

    def load(self) -> Any:
        """The record."""
        return _loaded(self.record)

    def run(self, asked: Any) -> None:
        """Do it."""
        _loaded(self.work)(asked)


def _loaded(where: str) -> Any:
    module, _, name = where.partition(":")
    return getattr(import_module(f".{module}", "homenode.cli"), name)


class Call(NamedTuple):
    """What the words of a command line ask for."""

    command: Command
    path: str
    words: tuple[str, ...]
    help: str = ""  # of the command, whole or in short

    def asked(self) -> Any:
        """The record of the command's options. Raises UsageError."""
        return read_words(self.command, self.path, self.words)


def call_of(command: Command, words: Sequence[str], path: str) -> Call:
    """The command that words name. Raises WrongCall."""
    while command.commands:
        first = words[0] if words else ""
        found = command.subcommands.get(first)
        if found is not None:
            command, path, words = found.whole(), f"{path} {first}", words[1:]
        elif command.record:
            break
        elif first in (*HELP, HELP_ALL):
            return Call(command, path, (), first)
        else:
            _refuse_command(command, path, first)
    ended = words.index("--") if "--" in words else len(words)
    asking = [word for word in words[:ended] if word in (*HELP, HELP_ALL)]
    return Call(command, path, tuple(words), asking[0] if asking else "")


def _refuse_command(command: Command, path: str, word: str) -> None:
    if not word:
        raise WrongCall(path, "expected a command, found none", group=command)
    if word.startswith("-"):
        raise WrongCall(path, f"expected a command, found the option {word}")
    from homenode.text import did_you_mean

    shown = [one.name for one in command.commands if not one.hidden]
    raise WrongCall(path, f"expected a command, found {word!r}", did_you_mean(word, shown))


class _Reading:
    """Words of a call, one after another, and what they have said so far."""

    def __init__(self, command: Command, path: str, words: Sequence[str]) -> None:
        self.path = path
        self.command = command
        self.parameters = command.parameters
        self.named = {name: one for one in self.parameters for name in one.opt.names}
        self.off = {
            name: one
            for one in self.parameters
            if isinstance(one.opt, Flag)
            for name in one.opt.off
        }
        self.rest = list(words)
        self.positions: list[str] = []
        self.values: dict[tuple[str, ...], Any] = {}

    def read(self) -> None:
        while self.rest:
            word = self.rest.pop(0)
            if word == "--":
                self.positions += self.rest
                return
            if word.startswith("--"):
                name, equals, value = word.partition("=")
                self.take(name, value if equals else None)
            elif word.startswith("-") and word != "-":
                self.letters(word)
            else:
                self.positions.append(word)

    def letters(self, word: str) -> None:
        """-n, -nq, -o FILE and -oFILE."""
        for at in range(1, len(word)):
            name = f"-{word[at]}"
            one = self.named.get(name)
            if one is not None and not isinstance(one.opt, Flag) and word[at + 1 :]:
                self.take(name, word[at + 1 :])
                return
            self.take(name, None, word)

    def take(self, name: str, value: str | None, word: str = "") -> None:
        one = self.named.get(name) or self.off.get(name)
        if one is None:
            self.refuse_option(word or name)
            return
        if isinstance(one.opt, Flag):
            if value is not None:
                raise WrongCall(self.path, f"{name}: expected no value, found {value!r}")
            self.values[one.path] = name not in self.off
            return
        if value is None:
            if not self.rest:
                raise WrongCall(self.path, f"{name}: expected {one.opt.metavar}, found nothing")
            value = self.rest.pop(0)
        self.give(one, value, name)

    def give(self, one: Parameter, text: str, name: str) -> None:
        if one.many:
            said = self.values.get(one.path, ())
            self.values[one.path] = (*said, self.value(one, text, name))
            return
        found = self.value(one, text, name)
        if self.values.get(one.path, found) != found:
            raise WrongCall(self.path, f"{name}: expected once, found twice, the second {text!r}")
        self.values[one.path] = found

    def value(self, one: Parameter, text: str, name: str) -> Any:
        try:
            return one.value(text, name)
        except UsageError as error:
            if one.opt.parse is not None:
                raise
            raise WrongCall(self.path, error.message, error.hint or "") from None

    def refuse_option(self, name: str) -> None:
        from homenode.text import did_you_mean

        known = [n for one in self.parameters for n in one.opt.names]
        known += [*self.off, HELP[0], HELP_ALL]
        raise WrongCall(self.path, f"no option {name}", did_you_mean(name, known))

    def place(self) -> None:
        """Give the words by position to the arguments: one each, and to a repeated one the rest."""
        arguments = [one for one in self.parameters if isinstance(one.opt, Arg)]
        words = self.positions
        for number, one in enumerate(arguments):
            after = sum(later.default is REQUIRED for later in arguments[number + 1 :])
            count = max(0, len(words) - after) if one.many else 1
            for word in words[:count]:
                self.give(one, word, one.opt.metavar)
            words = words[count:]
        if words:
            option = "name a host with --host SOURCE. " if "--host" in self.named else ""
            raise WrongCall(self.path, f"no argument {words[0]!r} is expected", option)

    def missing(self) -> None:
        for one in self.parameters:
            if one.default is REQUIRED and one.path not in self.values:
                what = "an argument" if isinstance(one.opt, Arg) else "the option"
                found = f"expected {what} {one.name}, found none"
                hint = (
                    f"one of {', '.join(one.choices)}" if one.choices else self.command.examples[0]
                )
                raise WrongCall(self.path, found, f"{hint}. ")


def read_words(command: Command, path: str, words: Sequence[str]) -> Any:
    """The record of a command's options. Raises UsageError, and what parsers of fields raise."""
    reading = _Reading(command, path, words)
    reading.read()
    reading.place()
    reading.missing()
    return _built(command.load(), reading.values, ())


def _built(
    record: Callable[..., Any], values: Mapping[tuple[str, ...], Any], path: tuple[str, ...]
) -> Any:
    own = {at[-1]: value for at, value in values.items() if at[:-1] == path}
    annotations: dict[str, Any] = {}
    for base in reversed(record.__mro__):  # type: ignore[attr-defined]
        annotations |= vars(base).get("__annotations__", {})
    for name, annotation in annotations.items():
        if _is_record(annotation):
            base = getattr(annotation, "__origin__", annotation)
            own[name] = _built(base, values, (*path, name))
    return record(**own)
