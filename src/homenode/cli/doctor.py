"""homenode doctor: what is wrong with links, settings and pins, and what to do. [I/O]"""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from homenode.cli.completion import domain_names
from homenode.cli.help import CommandWithActions, HelpCommand
from homenode.cli.options import ForceOption, HostOption, JsonOption, LspciOption, OutputOption
from homenode.cli.terminal import (
    STANDARD_OUTPUT,
    check_can_write,
    note,
    note_written,
    permissions_of,
    print_file,
    print_findings,
    refuse_to_overwrite,
    write_text,
)
from homenode.errors import UsageError
from homenode.input_files import read_input

if TYPE_CHECKING:
    from homenode.doctor.diagnosis import Circumstances
    from homenode.domain.document import Document
    from homenode.findings import Findings
    from homenode.topology import Host

app = typer.Typer(cls=CommandWithActions, no_args_is_help=False)

FleetOption = Annotated[
    list[str] | None,
    typer.Option(
        "--pool",
        metavar="POOL",
        help="Hosts as in `pool show`: each is compared with hosts of its kind.",
    ),
]


@app.command("doctor", cls=HelpCommand)
def doctor(
    document: Annotated[
        str | None,
        typer.Argument(
            metavar="[VM.xml]", help="Also check this domain document; - for standard input."
        ),
    ] = None,
    host: HostOption = None,
    lspci: LspciOption = None,
    live: Annotated[
        str | None,
        typer.Option(
            "--live",
            metavar="NAME",
            help="Also check this domain of this machine's libvirt.",
            autocompletion=domain_names,
        ),
    ] = None,
    h2d: Annotated[
        list[str] | None,
        typer.Option(
            "--h2d",
            metavar="[BDF=]GB/S",
            help="Host-to-device copies as measured: of one GPU, or of any. Repeatable.",
        ),
    ] = None,
    known_width: Annotated[
        list[str] | None,
        typer.Option(
            "--known-width",
            metavar="BDF=LANES",
            help="A slot that is wired narrower than its port. Repeatable.",
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
        typer.Option(
            "--load-command", metavar="COMMAND", help="With --under-load: what copies to the GPUs."
        ),
    ] = None,
    expect: Annotated[
        Path | None,
        typer.Option(
            "--expect", metavar="SITE.toml", help="Compare the host with its recorded state."
        ),
    ] = None,
    fix: Annotated[
        Path | None,
        typer.Option(
            "--fix", metavar="FILE", help="Plan the same VM again and write its document here."
        ),
    ] = None,
    everything: Annotated[bool, typer.Option("--all", help="Also print what is in order.")] = False,
    prometheus: Annotated[
        bool, typer.Option("--prometheus", help="Print Prometheus' text format.")
    ] = False,
    pool: FleetOption = None,
    force: ForceOption = False,
    json: JsonOption = False,
) -> None:
    """Find slow links, bad settings and costly pins, each with its evidence, cost and fix.

    Nothing is changed. The exit code is 1 where something is critical or a warning.

    Examples:
      homenode doctor VM.xml --host hgx-h100
      homenode doctor --pool captures/
    """
    if pool:
        from homenode.cli.fleet import compare_hosts

        if document or host or live or fix or expect or under_load or prometheus:
            raise UsageError("--pool: expected no other source and no option of one host")
        compare_hosts(pool, as_json=json)
        return
    from homenode.doctor.diagnosis import diagnose
    from homenode.doctor.site_checks import site_findings
    from homenode.domain.restore import is_tuned_output
    from homenode.findings import Findings, are_bad, in_order

    if json and prometheus:
        raise UsageError("give either --json or --prometheus, not both")
    if document is not None and live is not None:
        raise UsageError("give either VM.xml or --live, not both")
    if fix is not None and document is None and live is None:
        raise UsageError("--fix: expected VM.xml or --live NAME, whose VM is planned again")
    if fix is not None and fix.is_file() and not force and not is_tuned_output(fix):
        refuse_to_overwrite(fix, has_force=True)
    known = _circumstances(h2d, known_width)
    loaded = _host(host, lspci)
    _check_addresses(known, loaded)
    if under_load or load_command is not None:
        if not under_load:
            raise UsageError("--load-command: expected --under-load as well")
        if host is not None or lspci is not None:
            raise UsageError("--under-load: expected this machine, found another source")
        loaded, known = _under_load(loaded, known, load_command)
    original = _document(document, live)
    source = live or document or "domain"
    opened = None if original is None else _opened(original, source)
    found = diagnose(loaded, opened, known)
    if own := tuple(site_findings(loaded)):
        found = Findings(found.checked, in_order((*found.findings, *own)))
    if expect is not None:
        from homenode.doctor.expectation import drift
        from homenode.doctor.expectation_file import parse_expectation

        text = read_input(expect, "a site.toml").decode(errors="replace")
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


@app.command("retrain", cls=HelpCommand)
def retrain(
    devices: Annotated[
        list[str] | None,
        typer.Argument(metavar="BDF...", help="Devices whose links are trained again."),
    ] = None,
    target: Annotated[
        int | None,
        typer.Option(
            "--target",
            metavar="GEN",
            help="Generation to train to. Default: the fastest that both ends can.",
        ),
    ] = None,
    apply: Annotated[
        bool, typer.Option("--apply", help="Write the registers. Default: a dry run.")
    ] = False,
    print_unit: Annotated[
        bool, typer.Option("--print-unit", help="Print a systemd unit that does this at boot.")
    ] = False,
    print_hook: Annotated[
        bool, typer.Option("--print-hook", help="Print a libvirt hook that does this at VM start.")
    ] = False,
    json: JsonOption = False,
) -> None:
    """Train the link above a device again, at the fastest speed that both of its ends can.

    Without --apply it shows the registers that it would write. It refuses while a VM or a driver
    uses anything behind the port.

    Examples:
      homenode doctor retrain 41:00.0
      homenode doctor retrain 41:00.0 --apply
    """
    from homenode.cli import retrain as retraining

    wanted = retraining.Retraining(target, apply, print_unit, print_hook)
    retraining.retrain(tuple(devices or ()), wanted, as_json=json)


@app.command("hook", cls=HelpCommand, hidden=True)
def hook(
    words: Annotated[list[str] | None, typer.Argument(metavar="DOMAIN OPERATION")] = None,
    target: Annotated[int | None, typer.Option("--target", metavar="GEN")] = None,
) -> None:
    """What the libvirt hook of `retrain --print-hook` calls; the domain's XML is its input."""
    from homenode.cli import retrain as retraining

    retraining.hook(tuple(words or ()), target)


def expect(
    host: HostOption = None,
    output: OutputOption = None,
    floor: Annotated[
        list[str] | None,
        typer.Option(
            "--floor", metavar="NAME=GB/S", help="A bandwidth that must be reached: h2d=50."
        ),
    ] = None,
    pool: FleetOption = None,
    force: ForceOption = False,
) -> None:
    """Certify a host: its topology, links and bandwidth floors, to compare with later.

    `homenode doctor --expect SITE.toml` then finds any drift.

    Examples:
      homenode expect -o site.toml --floor h2d=50
      homenode doctor --expect site.toml
    """
    from homenode.doctor.expectation import FLOORS, certify
    from homenode.doctor.expectation_file import render_expectation
    from homenode.sources import load_host

    floors = {name: _gigabytes(value, "--floor") for name, value in _pairs(floor, "--floor")}
    unknown = sorted(floors.keys() - set(FLOORS))
    if unknown:
        raise UsageError(f"--floor: expected one of {', '.join(FLOORS)}, found {unknown[0]!r}")
    check_can_write(output, force=force)
    if pool:
        from homenode.cli.fleet import certify_majority

        if host is not None:
            raise UsageError("give either --host or --pool, not both")
        certify_majority(pool, output or STANDARD_OUTPUT, floors)
        note_written(output or STANDARD_OUTPUT)
        return
    loaded = load_host(host)
    text = render_expectation(certify(loaded, floors, _note_faults(loaded)))
    write_text(output or STANDARD_OUTPUT, text)
    note_written(output or STANDARD_OUTPUT)


def _note_faults(host: "Host") -> tuple[str, ...]:
    """Ids of what is wrong: it counts as sound from then on, so it is noted."""
    from homenode.doctor.diagnosis import diagnose
    from homenode.findings import Severity

    if host.nodes_assumed:
        note(
            f"{host.name}: its NUMA nodes cannot be read, and it is certified as one node; "
            "hint: in a container, run it on the host itself"
        )
    found = diagnose(host).findings
    for severity in (Severity.CRITICAL, Severity.WARNING, Severity.INCONCLUSIVE):
        ids = sorted({finding.id for finding in found if finding.severity is severity})
        if ids:
            note(f"certified as it is, {severity}: {', '.join(ids)}; look: homenode doctor")
    return tuple(sorted({finding.id for finding in found if finding.is_bad}))


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
    hint = "virsh dumpxml --inactive NAME > VM.xml"
    return read_input(path, "a domain document", hint=hint)


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
    if prometheus:
        from homenode.doctor.metrics import prometheus as metrics

        print_file(metrics(found, host.name))
    else:
        from dataclasses import replace

        shown = found if everything or json else replace(found, checked=found.checked[:1])
        print_findings(shown, as_json=json, with_sources=True)


def _fix(
    original: bytes, opened: "Document", source: str, host: "Host", output: Path, mode: int
) -> None:
    from homenode.auto_layout import settled
    from homenode.domain.read import vm_of
    from homenode.domain.restore import write_tuned
    from homenode.evidence.sources import load_evidence
    from homenode.plan.options import AUTO, PlanOptions
    from homenode.tuning import tune
    from homenode.vm.layout import layout_text

    options = settled(vm_of(opened), PlanOptions(AUTO), host, load_evidence(())).options
    tuning = tune(original, source, options, host)
    saved = write_tuned(output, original, tuning.document, mode)
    layout = layout_text(tuning.plan.layout)
    note(
        f"wrote {saved.output}: the same VM in layout {layout} (original in {saved.original}; "
        "homenode restore undoes it); it takes effect at the next start"
    )
