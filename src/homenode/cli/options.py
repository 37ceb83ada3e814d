"""Options that several commands share, and records of options. [I/O]"""

import functools
import inspect
from collections.abc import Callable
from dataclasses import MISSING, fields, is_dataclass
from pathlib import Path
from typing import Annotated, Any, get_args, get_origin

import typer

from homenode.cli.completion import domain_names, host_sources

HostOption = Annotated[
    str | None,
    typer.Option(
        "--host",
        metavar="SOURCE",
        help="The host: a capture, a folder or tar of /sys, an hwloc XML, a host.toml, lspci -vvv "
        "text, or a shipped host's name (homenode hosts). Default: this machine.",
        autocompletion=host_sources,
    ),
]

LspciOption = Annotated[
    Path | None,
    typer.Option(
        "--lspci",
        metavar="FILE",
        help="Output of lspci -vvv that replaces the host's PCI tree.",
    ),
]

DomainArgument = Annotated[
    str,
    typer.Argument(
        metavar="NAME", help="The domain: its name or UUID.", autocompletion=domain_names
    ),
]

DomainsArgument = Annotated[
    list[str],
    typer.Argument(
        metavar="NAME...", help="The domains: names or UUIDs.", autocompletion=domain_names
    ),
]

ConnectOption = Annotated[
    str, typer.Option("--connect", "-c", metavar="URI", help="The libvirt daemon.")
]

OutputOption = Annotated[
    Path | None,
    typer.Option("--output", "-o", metavar="FILE", help="Write it here; - for standard output."),
]

ForceOption = Annotated[
    bool,
    typer.Option("--force", "-f", help="Overwrite files that homenode did not write."),
]

JsonOption = Annotated[bool, typer.Option("--json", help="Print the documented JSON format.")]


def is_file_target(name: str) -> bool:
    """Whether a TARGET is a file rather than a domain's name."""
    if "/" in name or name.endswith(".xml"):
        return True
    try:
        return Path(f"{name}.orig").exists()
    except OSError:  # longer than the name of a file may be
        return False


class Without:
    """In the annotation of a record: fields that this command does not offer."""

    def __init__(self, *names: str) -> None:
        self.names = names


def with_records(command: Callable[..., None]) -> Callable[..., None]:
    """The command with each parameter that is a record of options replaced by the record's fields.

    A record is a frozen dataclass whose fields are annotated as parameters of a command are. A
    field of tuple[X, ...] is an option that may be repeated. Annotated[RECORD, Without(...)] leaves
    fields out.
    """
    signature = inspect.signature(command, eval_str=True)
    records: dict[str, Any] = {}
    parameters: list[inspect.Parameter] = []
    repeated: set[str] = set()
    for parameter in signature.parameters.values():
        record, *about = get_args(parameter.annotation) or (parameter.annotation,)
        if not (isinstance(record, type) and is_dataclass(record)):
            # After a record by name only, since the record's fields have defaults.
            kind = inspect.Parameter.KEYWORD_ONLY if records else parameter.kind
            parameters.append(parameter.replace(kind=kind))
            continue
        records[parameter.name] = record
        left_out = {name for one in about if isinstance(one, Without) for name in one.names}
        for field in fields(record):
            if field.name in left_out:
                continue
            annotation, default = field.type, field.default
            base, *extra = get_args(annotation)
            if get_origin(base) is tuple:
                repeated.add(field.name)
                annotation = Annotated[(list[get_args(base)[0]] | None, *extra)]  # type: ignore[misc]
                default = None
            parameters.append(
                inspect.Parameter(
                    field.name,
                    inspect.Parameter.KEYWORD_ONLY,
                    annotation=annotation,
                    default=inspect.Parameter.empty if default is MISSING else default,
                )
            )

    @functools.wraps(command)
    def expanded(*arguments: Any, **given: Any) -> None:
        for name in repeated & given.keys():
            given[name] = tuple(given[name] or ())
        for name, record in records.items():
            names = {field.name for field in fields(record)} & given.keys()
            given[name] = record(**{one: given.pop(one) for one in names})
        command(*arguments, **given)

    expanded.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    hints = {one.name: one.annotation for one in parameters}
    expanded.__annotations__ = {**hints, "return": None}
    return expanded


def as_words(record: Any) -> tuple[str, ...]:
    """The options of a record that are not as by default, as they are typed."""
    words: list[str] = []
    for field in fields(record):
        value = getattr(record, field.name)
        if value == field.default:
            continue
        (info,) = (one for one in get_args(field.type)[1:] if hasattr(one, "param_decls"))
        name = str(info.default)
        if isinstance(value, bool):
            words.append(name)
            continue
        for one in value if isinstance(value, tuple) else (value,):
            words += [name, str(one)]
    return tuple(words)
