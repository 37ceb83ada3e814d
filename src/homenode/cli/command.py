"""Command: reads the words of a command line into the record of a command's options. [I/O]

A record is a msgspec Struct. Each field that can be typed has an Opt, a Flag or an Arg in its
annotation; a field that is a record itself brings its own fields along.
"""

import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import copy
from enum import StrEnum
from functools import cache
from importlib import import_module
from math import isfinite
from pathlib import Path
from typing import Any, NamedTuple, cast

from msgspec import NODEFAULT

from homenode.errors import HostError, UsageError, find_near, missing, out_of_range, unknown
from homenode.option import Arg, Flag, Opt

HELP = ("--help", "-h")
HELP_ALL = "--help-all"
EXAMPLES = "Examples:"
OPTIONS = "Options:"
"""Sections of a record's docstring."""
REQUIRED = NODEFAULT
"""The default of a field without a default."""


class CallError(UsageError):
    """A call without a matching command."""

    def __init__(self, path: str, error: UsageError, group: "Command | None" = None) -> None:
        super().__init__(error.message, hint=error.hint)
        self.path = path  # the words that call the command
        self.group = group  # the group of commands whose name alone was typed: its help is printed


class IncludeFields:
    """Annotation of a record: the only fields, or panels, that this command offers."""

    def __init__(self, *names: str) -> None:
        self.names = names

    def takes(self, name: str, panel: str) -> bool:
        return name in self.names or panel in self.names


class OptionGroup:
    """Annotation of a record: the panel of its options, and whether all of them are rare."""

    def __init__(self, panel: str, *, rare: bool = False) -> None:
        self.panel, self.rare = panel, rare

    def move(self, parameter: "Parameter") -> "Parameter":
        opt = copy(parameter.opt)
        opt.panel, opt.rare = self.panel, self.rare or opt.rare
        return parameter._replace(opt=opt)


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
        """The description, then its values, then "Default:" unless the field's own value is one."""
        return read_option_helps(self.record).get(self.path[-1]) or self.opt.help

    @property
    def name(self) -> str:
        return self.opt.names[0] if self.opt.names else self.opt.metavar

    @property
    def choices(self) -> tuple[str, ...]:
        kinds = self.kind.__args__ if isinstance(self.kind, types.UnionType) else (self.kind,)
        if self.opt.parse is not None or not _is_enumeration(kinds[0]):
            return ()
        return tuple(str(choice) for kind in kinds for choice in kind)

    @property
    def example(self) -> str:
        """Return a value to type: a number's default or least value, else the placeholder."""
        numbers = [n for n in (self.default, self.opt.ge) if isinstance(n, (int, float))]
        return self.opt.show(numbers[0]) if numbers else self.opt.metavar

    def parse_value(self, text: str, name: str) -> Any:
        """Return the value of a word. Raises UsageError, or the errors of the field's parser."""
        if self.opt.parse is not None:
            return self.opt.parse(text, name)
        if self.choices:
            return self._parse_choice(text, name)
        if self.kind in (int, float):
            return self._parse_number(text, name)
        return Path(text) if self.kind is Path else text

    def _parse_choice(self, text: str, name: str) -> Any:
        if text not in self.choices:
            choices = f"{name} {'|'.join(self.choices)}"
            raise unknown("value", text, self.choices, choices, f"{name}: ")
        kinds = self.kind.__args__ if isinstance(self.kind, types.UnionType) else (self.kind,)
        return next(kind(text) for kind in kinds if text in list(kind))

    def _parse_number(self, text: str, name: str) -> Any:
        low, high = self.opt.ge, self.opt.le
        try:
            number = self.kind(text)
            if self.kind is float and not isfinite(number):
                raise ValueError(text)
        except ValueError:
            kind_name = "a whole number" if self.kind is int else "a number"
            raise UsageError(f"{name}: {text!r} is not {kind_name}") from None
        if not (low is None or number >= low) or not (high is None or number <= high):
            raise out_of_range(name, text, low, high)
        return number


def _is_enumeration(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, StrEnum)


def find_parameters(record: Any, path: tuple[str, ...] = ()) -> Iterator[Parameter]:
    """Yield the parameters of a record, in the order of its fields."""
    annotations = _find_annotations(record)
    names, defaults = record.__struct_fields__, record.__struct_defaults__
    default_of = dict(zip(names[len(names) - len(defaults) :], defaults, strict=True))
    for name in names:
        annotation = annotations[name]
        about = getattr(annotation, "__metadata__", ())
        base = annotation.__origin__ if about else annotation
        if _is_record(annotation):
            limits = [mark for mark in about if isinstance(mark, IncludeFields)]
            groups = [mark for mark in about if isinstance(mark, OptionGroup)]
            for parameter in find_parameters(base, (*path, name)):
                field = parameter.path[-1]
                if all(limit.takes(field, parameter.opt.panel) for limit in limits):
                    yield groups[0].move(parameter) if groups else parameter
            continue
        for opt in about:
            if isinstance(opt, Opt):
                kind, is_repeated = _find_kind(base)
                default = default_of.get(name, NODEFAULT)
                yield Parameter((*path, name), opt, kind, is_repeated, default, record)


def _find_annotations(record: Any) -> dict[str, Any]:
    """Return the annotations of a record and of its bases, these first."""
    annotations: dict[str, Any] = {}
    for base in reversed(record.__mro__):
        annotations |= vars(base).get("__annotations__", {})
    return annotations


@cache
def read_option_helps(record: Any) -> dict[str, str]:
    """A record's descriptions of options by field: the lines after "Options:" in its docstring."""
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
    """Return whether a field is a nested record: a record that is not typed as one word."""
    about = getattr(annotation, "__metadata__", ())
    base = annotation.__origin__ if about else annotation
    return hasattr(base, "__struct_fields__") and not any(isinstance(mark, Opt) for mark in about)


def _find_kind(annotation: Any) -> tuple[Any, bool]:
    """Return the type of one value, and whether the field has several."""
    if isinstance(annotation, types.UnionType):
        annotation, *others = (kind for kind in annotation.__args__ if kind is not types.NoneType)
        for other in others:
            annotation = annotation | other
    many = getattr(annotation, "__origin__", None) is tuple and ... in annotation.__args__
    kind = annotation.__args__[0] if many else annotation
    return getattr(kind, "__supertype__", kind), many


def format_words(record: Any) -> tuple[str, ...]:
    """Return the options of a record that differ from their defaults, as typed."""
    words: list[str] = []
    for parameter in find_parameters(type(record)):
        value = record
        for name in parameter.path:
            value = getattr(value, name)
        if value == parameter.default:
            continue
        if isinstance(value, bool):
            words.append(parameter.name)
            continue
        for part in value if parameter.many else (value,):
            words += [parameter.name, parameter.opt.show(part)]
    return tuple(words)


class Command(NamedTuple):
    """A command, a group of commands, or both."""

    name: str
    record: str = ""  # its options: "module:name" below homenode.cli, or ".module:name" next to it
    work: str = ""  # the function that does it, likewise
    panel: str = "Commands"
    about: str = ""  # the help of a group; a command's is its record's docstring
    commands: "tuple[Command, ...]" = ()
    hidden: bool = False
    room: str = ""  # where the whole of a group is, which is imported when its name is typed

    def load_room(self) -> "Command":
        """The command with its room loaded. Raises HostError if the room is not installed."""
        if not self.room:
            return self
        room = f"homenode.{self.room.split('.')[1]}"
        try:
            return cast(Command, _import_object(self.room))
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
        """The example commands at the end of its help."""
        _, _, after = self.help.partition(EXAMPLES)
        lines = after.replace("\\\n", " ").splitlines()
        return tuple(" ".join(line.split()) for line in lines if line.strip())

    @property
    def parameters(self) -> tuple[Parameter, ...]:
        return tuple(find_parameters(self.load())) if self.record else ()

    @property
    def subcommands(self) -> "Mapping[str, Command]":
        return {command.name: command for command in self.commands}

    def load(self) -> Any:
        return _import_object(self.record)

    def run(self, options: Any) -> None:
        _import_object(self.work)(options)


def _import_object(reference: str) -> Any:
    module, _, name = reference.partition(":")
    return getattr(import_module(f".{module}", "homenode.cli"), name)


class Call(NamedTuple):
    """The command and options of a command line."""

    command: Command
    path: str
    words: tuple[str, ...]
    help: str = ""  # help of the command, complete or short

    def read_options(self) -> Any:
        """Return the record of the command's options. Raises UsageError."""
        return read_words(self.command, self.path, self.words)


def find_call(command: Command, words: Sequence[str], path: str) -> Call:
    """Return the command that the words name. Raises CallError."""
    while command.commands:
        first = words[0] if words else ""
        subcommand = command.subcommands.get(first)
        if subcommand is not None:
            command, path, words = subcommand.load_room(), f"{path} {first}", words[1:]
        elif command.record:
            break
        elif first in (*HELP, HELP_ALL):
            return Call(command, path, (), first)
        else:
            _reject_command(command, path, first)
    end = words.index("--") if "--" in words else len(words)
    asking = [word for word in words[:end] if word in (*HELP, HELP_ALL)]
    return Call(command, path, tuple(words), asking[0] if asking else "")


def _reject_command(command: Command, path: str, word: str) -> None:
    if not word:
        raise CallError(path, missing("COMMAND", f"{path} --help"), command)
    names = [sub.name for sub in command.commands if not sub.hidden]
    if word.startswith("-"):
        raise CallError(path, unknown("option", word, [*HELP, "--version"], f"{path} --help"))
    raise CallError(path, unknown("command", word, names, f"{path} {'|'.join(names)}"))


class _WordReader:
    """Reads the words of a call one after another, and collects their values."""

    def __init__(self, command: Command, path: str, words: Sequence[str]) -> None:
        self.path = path
        self.command = command
        self.parameters = command.parameters
        self.named = {
            name: parameter for parameter in self.parameters for name in parameter.opt.names
        }
        self.off = {
            name: parameter
            for parameter in self.parameters
            if isinstance(parameter.opt, Flag)
            for name in parameter.opt.off
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
                self.read_letters(word)
            else:
                self.positions.append(word)

    def read_letters(self, word: str) -> None:
        """-n, -nq, -o FILE and -oFILE."""
        for at in range(1, len(word)):
            name = f"-{word[at]}"
            parameter = self.named.get(name)
            if parameter is not None and not isinstance(parameter.opt, Flag) and word[at + 1 :]:
                self.take(name, word[at + 1 :])
                return
            self.take(name, None, word)

    def take(self, name: str, value: str | None, word: str = "") -> None:
        parameter = self.named.get(name) or self.off.get(name)
        if parameter is None:
            self.reject_option(word or name)
            return
        if isinstance(parameter.opt, Flag):
            if value is not None:
                raise self.make_error(f"{name} takes no value: {value!r}", name)
            self.values[parameter.path] = name not in self.off
            return
        if value is None:
            if not self.rest:
                hint = f"{self.path} {name} {parameter.opt.metavar}"
                raise self.make_error(f"{name}: missing {parameter.opt.metavar}", hint)
            value = self.rest.pop(0)
        self.store_value(parameter, value, name)

    def make_error(self, message: str, hint: str | None = None) -> CallError:
        examples = self.command.examples
        return CallError(self.path, UsageError(message, hint=hint or next(iter(examples), None)))

    def store_value(self, parameter: Parameter, text: str, name: str) -> None:
        if parameter.many:
            values = self.values.get(parameter.path, ())
            self.values[parameter.path] = (*values, self.parse_value(parameter, text, name))
            return
        value = self.parse_value(parameter, text, name)
        if self.values.get(parameter.path, value) != value:
            raise self.make_error(f"{name} is repeated", f"{self.path} {name} {text}")
        self.values[parameter.path] = value

    def parse_value(self, parameter: Parameter, text: str, name: str) -> Any:
        try:
            return parameter.parse_value(text, name)
        except UsageError as error:
            if parameter.opt.parse is not None:
                raise
            error.hint = error.hint or f"{self.path} {name} {parameter.example}".rstrip()
            raise CallError(self.path, error) from None

    def reject_option(self, name: str) -> None:
        names = [spelling for parameter in self.parameters for spelling in parameter.opt.names]
        names += [*self.off, *HELP, HELP_ALL]
        hint = None
        if not find_near(name, names):
            usual = [p.opt.names[0] for p in self.parameters if p.opt.names and not p.opt.rare]
            hint = f"{self.path} has {', '.join(usual)}; all: {HELP_ALL}"
        raise CallError(self.path, unknown("option", name, names, hint))

    def place(self) -> None:
        """Assign positional words to the arguments: one each, the others to a repeated argument."""
        arguments = [argument for argument in self.parameters if isinstance(argument.opt, Arg)]
        words = self.positions
        for number, argument in enumerate(arguments):
            after = sum(follower.default is REQUIRED for follower in arguments[number + 1 :])
            count = max(0, len(words) - after) if argument.many else 1
            for word in words[:count]:
                self.store_value(argument, word, argument.opt.metavar)
            words = words[count:]
        if words:
            options = [
                parameter.name
                for parameter in self.parameters
                if parameter.default is REQUIRED and parameter.path not in self.values
            ]
            usual = ("--domain",) if words[0].endswith(".xml") else ()
            options += [name for name in (*usual, "--host", "--pool") if name in self.named]
            before = "" if arguments else f"{self.path} "
            is_host = options and not arguments
            hint = f"{before}{options[0]} {words[0]}" if is_host else None
            stem = f"--{words[0].partition('.')[0]}"
            hint = f"{stem} {words[0]}" if stem in self.named else hint
            raise self.make_error(f"unexpected argument {words[0]!r}", hint)

    def check_required(self) -> None:
        for parameter in self.parameters:
            if parameter.default is REQUIRED and parameter.path not in self.values:
                name, choices = parameter.name, "|".join(parameter.choices)
                hint = f"{self.path} {name} {choices}" if choices else self.command.examples[0]
                raise CallError(self.path, missing(name, hint))


def read_words(command: Command, path: str, words: Sequence[str]) -> Any:
    """The record of a command's options. Raises UsageError, and the errors of fields' parsers."""
    reading = _WordReader(command, path, words)
    reading.read()
    reading.place()
    reading.check_required()
    return _build_record(command.load(), reading.values, ())


def _build_record(
    record: Callable[..., Any], values: Mapping[tuple[str, ...], Any], path: tuple[str, ...]
) -> Any:
    fields = {at[-1]: value for at, value in values.items() if at[:-1] == path}
    for name, annotation in _find_annotations(record).items():
        if _is_record(annotation):
            base = getattr(annotation, "__origin__", annotation)
            fields[name] = _build_record(base, values, (*path, name))
    return record(**fields)
