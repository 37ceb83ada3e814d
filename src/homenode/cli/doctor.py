"""homenode doctor: what is wrong with links, settings and pins, and what to do. [I/O]"""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from homenode.cli.options import HostOption, JsonOption, LspciOption
from homenode.cli.retrain import Retraining
from homenode.cli.terminal import (
    LARGEST_FILE_BYTES,
    console,
    note,
    permissions_of,
    print_file,
    print_json,
    read_file,
    write_text,
)
from homenode.errors import UsageError

if TYPE_CHECKING:
    from homenode.doctor.diagnosis import Circumstances
    from homenode.domain.document import Document
    from homenode.findings import Findings
    from homenode.topology import Host

_RETRAIN = "With retrain"


def doctor(
    words: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[VM.xml]",
            help="Also a domain of this host; - for standard input. Or: retrain BDF...",
        ),
    ] = None,
    host: HostOption = None,
    lspci: LspciOption = None,
    live: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Also this domain of the libvirt on this machine."),
    ] = None,
    h2d: Annotated[
        list[str] | None,
        typer.Option(
            metavar="[BDF=]GB/S",
            help="Host-to-device copies as measured: of one GPU, or of any. Repeatable.",
        ),
    ] = None,
    known_width: Annotated[
        list[str] | None,
        typer.Option(
            metavar="BDF=LANES", help="A slot that is wired narrower than its port. Repeatable."
        ),
    ] = None,
    under_load: Annotated[
        bool,
        typer.Option(
            "--under-load", help="Read links while a copy runs: nvbandwidth, PyTorch, ..."
        ),
    ] = False,
    load_command: Annotated[
        str | None,
        typer.Option(metavar="COMMAND", help="With --under-load: what copies to the GPUs."),
    ] = None,
    expect: Annotated[
        Path | None,
        typer.Option(metavar="SITE.toml", help="Hold the host against what was certified."),
    ] = None,
    fix: Annotated[
        Path | None,
        typer.Option(metavar="OUT.xml", help="Plan the same VM anew and write it here."),
    ] = None,
    everything: Annotated[bool, typer.Option("--all", help="What was looked at as well.")] = False,
    prometheus: Annotated[
        bool, typer.Option("--prometheus", help="Print Prometheus' text format.")
    ] = False,
    target: Annotated[
        int | None,
        typer.Option(
            metavar="GEN",
            help="Generation to train to. Default: what both ends can.",
            rich_help_panel=_RETRAIN,
        ),
    ] = None,
    apply: Annotated[
        bool,
        typer.Option(
            "--apply", help="Write the registers; else a dry run.", rich_help_panel=_RETRAIN
        ),
    ] = False,
    print_unit: Annotated[
        bool,
        typer.Option(
            "--print-unit",
            help="Print a systemd unit that does this at boot.",
            rich_help_panel=_RETRAIN,
        ),
    ] = False,
    print_hook: Annotated[
        bool,
        typer.Option(
            "--print-hook",
            help="Print a libvirt hook that does this at VM start.",
            rich_help_panel=_RETRAIN,
        ),
    ] = False,
    json: JsonOption = False,
) -> None:
    """Find slow links, bad settings and costly pins, each with its evidence, cost and fix.

    Nothing is changed; exit code 1 where something is critical or a warning. `homenode doctor
    retrain BDF` trains the link above a device anew, and is a dry run without --apply.
    """
    first = words[0] if words else None
    writes = Retraining(target, apply, print_unit, print_hook)
    if first in ("retrain", "hook"):
        from homenode.cli import retrain

        others = {
            "--host": host, "--lspci": lspci, "--live": live, "--h2d": h2d, "--all": everything,
            "--known-width": known_width, "--under-load": under_load, "--expect": expect,
            "--load-command": load_command, "--fix": fix, "--prometheus": prometheus,
        }  # fmt: skip
        if given := [name for name, value in others.items() if value]:
            raise UsageError(
                f"doctor {first}: expected devices of this machine and options of retrain, found "
                f"{', '.join(given)}"
            )
        rest = tuple((words or [])[1:])
        if first == "hook":
            retrain.hook(rest, target)
        else:
            retrain.retrain(rest, writes, as_json=json)
        return
    if writes != Retraining():
        raise UsageError(
            "--target, --apply, --print-unit and --print-hook: expected doctor retrain BDF, found "
            f"doctor {first or ''}".rstrip()
        )
    if words is not None and len(words) > 1:
        raise UsageError(f"doctor: expected one VM.xml, found {len(words)}: {' '.join(words)}")
    document = first
    from homenode.doctor.diagnosis import diagnose
    from homenode.findings import Findings, are_bad, in_order

    if json and prometheus:
        raise UsageError("--json and --prometheus: expected one of the two, found both")
    if document is not None and live is not None:
        raise UsageError("VM.xml and --live: expected one of the two, found both")
    if fix is not None and document is None and live is None:
        raise UsageError("--fix: expected a VM.xml or --live NAME to plan, found neither")
    known = _circumstances(h2d, known_width)
    loaded = _host(host, lspci)
    _check_addresses(known, loaded)
    if under_load or load_command is not None:
        if not under_load:
            raise UsageError("--load-command: expected --under-load beside it, found none")
        if host is not None or lspci is not None:
            raise UsageError("--under-load: expected this machine, found another source")
        loaded, known = _under_load(loaded, known, load_command)
    original = _document(document, live)
    source = live or document or "domain"
    opened = None if original is None else _opened(original, source)
    found = diagnose(loaded, opened, known)
    if expect is not None:
        from homenode.doctor.expectation import drift
        from homenode.doctor.expectation_file import parse_expectation

        text = read_file(expect, "a site.toml").decode(errors="replace")
        drifted = drift(parse_expectation(text, str(expect)), loaded, known.slowest_h2d)
        found = Findings(
            (*found.checked, f"{expect}: topology, links and floors"),
            in_order((*found.findings, *drifted)),
        )
    _print(found, loaded, json=json, prometheus=prometheus, everything=everything)
    if fix is not None and original is not None and opened is not None:
        _fix(original, opened, source, loaded, fix, permissions_of(document or "-"))
    if are_bad(found.findings):
        raise typer.Exit(1)


def expect(
    host: Annotated[
        str | None,
        typer.Argument(metavar="[HOST]", help="As --host of other commands; default this machine."),
    ] = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", metavar="SITE.toml", help="Write it here.")
    ] = None,
    floor: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=GB/S", help="A bandwidth that must be reached: h2d=50."),
    ] = None,
) -> None:
    """Write down what a certified host is like: topology, links and bandwidth floors.

    `homenode doctor --expect SITE.toml` then finds any drift.
    """
    from homenode.doctor.expectation import FLOORS, certify
    from homenode.doctor.expectation_file import render_expectation
    from homenode.sources import load_host

    floors = {name: _gigabytes(value, "--floor") for name, value in _pairs(floor, "--floor")}
    unknown = sorted(floors.keys() - set(FLOORS))
    if unknown:
        raise UsageError(f"--floor: expected one of {', '.join(FLOORS)}, found {unknown[0]!r}")
    loaded = load_host(host)
    text = render_expectation(certify(loaded, floors))
    _note_faults(loaded)
    if output is None:
        print_file(text)
    else:
        write_text(output, text)
        note(f"wrote {output}")


def _note_faults(host: "Host") -> None:
    """Whatever is certified counts as sound from then on, so what is not is said."""
    from homenode.doctor.diagnosis import diagnose
    from homenode.findings import Severity

    found = diagnose(host).findings
    for severity in (Severity.CRITICAL, Severity.WARNING, Severity.INCONCLUSIVE):
        ids = sorted({finding.id for finding in found if finding.severity is severity})
        if ids:
            note(f"certified as it is, {severity}: {', '.join(ids)}; look: homenode doctor")


def _host(source: str | None, lspci: Path | None) -> "Host":
    from homenode.sources import load_host

    return load_host(source, lspci=lspci)


def _under_load(
    host: "Host", known: "Circumstances", command: str | None
) -> "tuple[Host, Circumstances]":
    """The host as its links are while a copy runs, and what the copy says of itself."""
    import shlex
    from dataclasses import replace

    from homenode.doctor.links.load_program import load_program
    from homenode.doctor.links.load_sampling import sample_under_load
    from homenode.doctor.links.slow import Load
    from homenode.snapshot.live import LiveSnapshot

    try:
        words = None if command is None else shlex.split(command)
    except ValueError as error:
        raise UsageError(
            f"--load-command: expected words as for a shell, found {command!r}: {error}"
        ) from None
    if words == []:
        raise UsageError("--load-command: expected a program, found nothing")
    program = load_program(words)
    note(f"running {' '.join(program.argv)} and reading links meanwhile")
    busy, reached = sample_under_load(host, LiveSnapshot(), program)
    # What the user says was measured goes before what we measured on the side.
    h2d = {gpu: rate for gpu, rate in reached.h2d.items() if known.h2d_all is None}
    return busy, replace(known, load=Load.BUSY, reached=reached.gpus, h2d={**h2d, **known.h2d})


def _document(path: str | None, live: str | None) -> bytes | None:
    if live is not None:
        from homenode.process import run

        argv = ("virsh", "-q", "-r", "-c", "qemu:///system", "dumpxml", "--", live)
        return run(argv, 30).stdout_or_raise().encode()
    if path is None:
        return None
    if path == "-":
        import sys

        return sys.stdin.buffer.read(LARGEST_FILE_BYTES)
    hint = "virsh dumpxml --inactive NAME > VM.xml"
    return read_file(Path(path), "a domain document", hint=hint)


def _opened(original: bytes, source: str) -> "Document":
    from homenode.domain.read import open_domain

    return open_domain(original, source)


def _circumstances(h2d: list[str] | None, known_width: list[str] | None) -> "Circumstances":
    from homenode.bdf import Bdf
    from homenode.doctor.diagnosis import Circumstances

    rates: dict[Bdf, float] = {}
    everyone: float | None = None
    for text in h2d or ():
        name, equals, value = text.rpartition("=")
        if equals:
            rates[Bdf.parse(name, "--h2d")] = _gigabytes(value, "--h2d")
        else:
            everyone = _gigabytes(value, "--h2d")
    widths: dict[Bdf, int] = {}
    for name, value in _pairs(known_width, "--known-width"):
        lanes = value.removeprefix("x")
        if lanes not in ("1", "2", "4", "8", "16"):
            raise UsageError(f"--known-width: expected lanes such as 8, found {value!r}")
        widths[Bdf.parse(name, "--known-width")] = int(lanes)
    return Circumstances(known_widths=widths, h2d=rates, h2d_all=everyone)


def _check_addresses(known: "Circumstances", host: "Host") -> None:
    """Raises UsageError for a device that the host does not have: it would count for nothing."""
    from homenode.pci import DeviceKind

    for option, bdfs in (("--h2d", known.h2d), ("--known-width", known.known_widths)):
        for bdf in bdfs:
            device = host.device(bdf)
            if device is None:
                raise UsageError(
                    f"{option}: expected a device of {host.name}, found none at {bdf}",
                    hint="homenode show --all lists them",
                )
            if option == "--h2d" and device.kind is not DeviceKind.GPU:
                raise UsageError(f"--h2d: expected a GPU, found a {device.kind} at {bdf}")


def _pairs(texts: list[str] | None, option: str) -> list[tuple[str, str]]:
    pairs = []
    for text in texts or ():
        name, equals, value = text.partition("=")
        if not (name and equals and value):
            raise UsageError(f"{option}: expected NAME=VALUE, found {text!r}")
        pairs.append((name.strip(), value.strip()))
    return pairs


def _gigabytes(text: str, option: str) -> float:
    """Bytes/s of a number of GB/s."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < 1e6:
        raise UsageError(f"{option}: expected GB/s such as 53.5, found {text!r}")
    return value * 1e9


def _print(
    found: "Findings", host: "Host", *, json: bool, prometheus: bool, everything: bool
) -> None:
    if json:
        from homenode.formats import encode

        print_json(encode("findings", found))
    elif prometheus:
        from homenode.doctor.metrics import prometheus as metrics

        print_file(metrics(found, host.name))
    else:
        from dataclasses import replace

        from homenode.report.findings_text import findings_text

        shown = found if everything else replace(found, checked=found.checked[:1])
        console().print(findings_text(shown, with_sources=True))


def _fix(
    original: bytes, opened: "Document", source: str, host: "Host", output: Path, mode: int
) -> None:
    from homenode.doctor.guest.remedy import remedy
    from homenode.domain.restore import write_tuned
    from homenode.tuning import tune
    from homenode.verify.domain_facts import domain_facts

    wishes = remedy(domain_facts(opened), host)
    tuning = tune(original, source, wishes, host)
    saved = write_tuned(output, original, tuning.document, mode)
    note(
        f"wrote {saved.output}: the same VM in layout {wishes.layout} (original in "
        f"{saved.original}; homenode restore undoes it); start the VM anew for it to count"
    )
