"""homenode plan: read, tune, print, write; for libvirt or for another target. [I/O]"""

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from msgspec.structs import replace

from homenode.cli.arguments.place import PlanArguments
from homenode.cli.terminal import (
    STANDARD_OUTPUT,
    check_can_write,
    console,
    error_console,
    note,
    permissions_of,
    print_diff,
    print_document,
    print_json,
    refuse_to_overwrite,
    write_bytes,
    write_text,
)
from homenode.errors import UsageError
from homenode.plan.auto import refuse_auto, resolve_layout
from homenode.plan.stored import encode_plan, encode_refusal, read_plan, with_planned
from homenode.plan.tuning import Tuning, tune, tune_manually
from homenode.safe.input_files import read_input
from homenode.vm.domain.read import read_vm
from homenode.vm.domain.restore import SavedOriginal, is_tuned_output, saved_original, write_tuned
from homenode.vm.domain.schema import refuse_new_errors
from homenode.vm.plan_model import Plan, Unplannable
from homenode.vm.plan_options import AUTO, PlanOptions
from homenode.vm.sources import load_host

if TYPE_CHECKING:
    from homenode.machine.topology import Host
    from homenode.plan.auto import Choose
    from homenode.vm.model import Vm


OPTIONS = "options"
"""What to call a VM of which only options say something."""


def run(asked: PlanArguments, agreed: Callable[[], bool] | None = None) -> Tuning:
    """Plan for libvirt, write and print; see `tune_and_write`."""
    return tune_and_write(*read_original(asked), asked, agreed)


def read_original(asked: PlanArguments) -> tuple[bytes | None, str]:
    """The document or VM file that is planned for, None where options say all; and what to call it.

    Raises HostError, InputError and UsageError before anything is planned.
    """
    _check_outputs(asked)
    document = asked.document or asked.vm_file
    if asked.manual.sibling_pus and not asked.manual.node_pus:
        raise UsageError("--sibling-cpus: expected --node-cpus as well, found none")
    original = None if document is None else _read(document)
    return original, OPTIONS if document is None else document


def tune_and_write(
    original: bytes | None,
    source: str,
    asked: PlanArguments,
    agreed: Callable[[], bool] | None = None,
) -> Tuning:
    """Plan, write and print. Nothing is written unless everything before succeeded.

    agreed: asked before a tuned document is written, when all is printed; without it files are
    written first, so that whoever reads no more of what is printed has them.
    """
    options = asked.options
    if original is None:
        _check_new_output(asked.output, force=asked.force)
    else:
        check_tuned_output(source, asked.output, force=asked.force)
    host: Host | None = None
    why: tuple[str, ...] = ()
    try:
        if asked.manual.node_pus:
            if original is None:
                raise UsageError("--node-cpus: expected a domain document, found none")
            _refuse_with_ranges(asked)

            refuse_auto(options)
            tuning = tune_manually(original, source, options, asked.manual, copy_name=asked.name)
        else:
            host, tuning, why = _on_best_host(original, source, asked)
            # The picture would show them on the PUs that the VM gets.
            left = tuple(one for one in host.domains if one.name not in asked.options.replaces)
            host = replace(host, domains=left)
    except Unplannable as error:
        say_why_not(error, as_json=asked.json)
        raise SystemExit(error.exit_code) from None
    if agreed is None:
        lines = _write(tuning, host, original, asked, source)
        _print(tuning, why, host, original, source, asked)
    else:
        _print(tuning, why, host, original, source, asked)
        lines = _write(tuning, host, original, asked, source) if agreed() else []
    for line in lines:
        note(line)
    return tuning


def with_versions(host: "Host", asked: PlanArguments) -> "Host":
    """The host with the versions that were given instead of those found."""
    settings = host.settings
    return replace(
        host,
        settings=replace(
            settings,
            libvirt_version=asked.libvirt or settings.libvirt_version,
            qemu_version=asked.qemu or settings.qemu_version,
        ),
    )


def hosts_after(hosts: "tuple[Host, ...]", plans: Sequence[Path]) -> "tuple[Host, ...]":
    """The hosts with the VMs of the saved plans of --after. Raises InputError, UsageError."""
    if not plans:
        return hosts

    hint = "homenode plan --save-plan writes one"
    read = [(str(path), read_input(path, "a saved plan", hint=hint)) for path in plans]
    return with_planned(hosts, [(source, read_plan(text, source)) for source, text in read])


def _check_outputs(asked: PlanArguments) -> None:
    """Raises HostError and UsageError before anything is planned."""
    printed = [one for one in (asked.output, asked.save_plan, asked.svg) if one == STANDARD_OUTPUT]
    if len(printed) + asked.json + asked.diff > 1 and printed:
        raise UsageError("-: expected one thing for standard output, found several")
    check_can_write(asked.save_plan, asked.svg, force=asked.force)
    check_can_write(asked.output, force=True)
    paths = [asked.output, asked.save_plan, asked.svg]
    if asked.output is not None and asked.output != STANDARD_OUTPUT:
        saved = saved_original(asked.output)
        paths += [saved.original, saved.record]
    refuse_one_path(paths)


def refuse_one_path(paths: Iterable[Path | None]) -> None:
    """Raises UsageError where two of the files that a command writes are one."""
    seen: set[Path] = set()
    for path in paths:
        if path is None or path == STANDARD_OUTPUT:
            continue
        real = path.resolve()
        if real in seen:
            raise UsageError(
                f"{path}: expected a file for each thing to write, found the same one twice",
                hint="give -o, --save-plan and --svg names of their own",
            )
        seen.add(real)


def _check_new_output(path: Path | None, *, force: bool) -> None:
    """Raises UsageError where a new domain would overwrite a file: it may be the same one, to which
    somebody has added disks since."""
    if path is None or path == STANDARD_OUTPUT or force or not path.is_file():
        return
    if path.stat().st_size:
        from homenode.wording import command_line

        raise UsageError(
            f"{path}: expected no file for a new domain, found one",
            hint=f"{command_line('homenode', 'plan', path)} plans that one; --force overwrites it",
        )


def check_tuned_output(document: str, path: Path | None, *, force: bool | None = None) -> None:
    """Raises UsageError where -o is a file that is neither the VM's nor tuned by homenode. force:
    overwrite it; None where no option says so."""
    if path is None or path == STANDARD_OUTPUT or force or not path.is_file():
        return

    # Over the document itself the original is kept, and so it is over what was tuned from it.
    is_same = document != "-" and Path(document).exists() and path.samefile(document)
    if not is_same and path.stat().st_size and not is_tuned_output(path):
        refuse_to_overwrite(path, has_force=force is not None)


def _read(document: str) -> bytes:
    return read_input(document, "a domain document", hint="virsh dumpxml --inactive NAME > VM.xml")


def _refuse_with_ranges(asked: PlanArguments) -> None:
    """Manual mode takes vCPUs and PUs from the lists, and has no host to choose or draw from."""
    for option, given in (
        ("--host", bool(asked.hosts)),
        ("--lspci", asked.lspci is not None),
        ("--svg", asked.svg is not None),
        ("--vcpus", asked.options.vcpus is not None),
        ("--gpus", asked.options.gpu_count is not None),
        ("--with-nics", asked.options.with_nics),
        ("--with-nvswitches", asked.options.with_nvswitches),
        ("--device UUID", any(isinstance(one, str) for one in asked.options.devices)),
        ("--ignore-domain", bool(asked.options.replaces)),
        ("--after", bool(asked.after)),
        ("--guest-node", bool(asked.options.explicit_cells)),
    ):
        if given:
            raise UsageError(f"give either --node-cpus or {option}, not both")


def _on_best_host(
    original: bytes | None,
    document: str,
    asked: PlanArguments,
) -> "tuple[Host, Tuning, tuple[str, ...]]":
    names = asked.hosts or (None,)
    if len(names) > 1 and asked.lspci is not None:
        raise UsageError("--lspci: expected one --host to lay it over, found several")
    if len(names) > 1 and asked.options.replaces:
        raise UsageError(
            "--ignore-domain: expected one --host, which has the domain, found several"
        )
    hosts = tuple(with_versions(load_host(name, lspci=asked.lspci), asked) for name in names)
    hosts = hosts_after(hosts, asked.after)
    copy_name = asked.name
    if original is None:
        from homenode.plan.vm_file import size_of_options
        from homenode.vm.domain.copy import DEFAULT_NAME, new_domain

        original = new_domain(
            *size_of_options(asked.options),
            architecture=hosts[0].architecture,
            name=copy_name or DEFAULT_NAME,
        )
        copy_name = None
    guest = read_vm(original, document)
    choose = choose_by(asked.results)
    best = hosts[0] if len(hosts) == 1 else best_of(guest, hosts, choose, asked)
    note_sick_links(best, asked.options)
    chosen = resolve_layout(guest, asked.options, best, choose)
    tuning = tune(original, document, chosen.options, best, copy_name=copy_name)
    return best, tuning, chosen.why


def choose_by(results: Sequence[str]) -> "Choose | None":
    """What chooses a layout in place of the table: these results; None without any."""
    if not results:
        return None
    from homenode.decide.sentences import by_results
    from homenode.measure.imported.sources import load_sources

    return by_results([run for named in load_sources(results) for run in named.runs])


def note_sick_links(host: "Host", options: PlanOptions) -> None:
    """Warn of the host's slow links where homenode chooses the layout: each is slow on them."""
    if options.layout != AUTO:
        return
    from homenode.check.doctor.links import link_health

    for finding in link_health(host):
        note(f"warning: {finding.subject}: found {finding.observed}, expected {finding.expected}")
        note(f"  {finding.fix} ({finding.id})")


def best_of(
    guest: "Vm",
    hosts: "Sequence[Host]",
    choose: "Choose | None",
    asked: PlanArguments,
) -> "Host":
    from homenode.plan.planner import rank
    from homenode.plan.request import request_for
    from homenode.show.fit_text import rank_text

    requests = []
    for host in hosts:
        chosen = resolve_layout(guest, asked.options, host, choose).options
        requests.append((host, request_for(guest, chosen, host)))
    ranking = rank(requests)
    if not (asked.quiet or asked.json):
        console().print(rank_text(ranking))
    best = ranking[0].host
    if ranking[0].placement is None:
        note(f"none of the {len(hosts)} hosts can hold the VM; why {best.name} cannot:")
    else:
        note(f"best host: {best.name}")
    return best


def say_why_not(error: Unplannable, *, as_json: bool = False) -> None:
    """Every rejection, for people on standard error or as JSON on standard output."""
    if as_json:
        print_json(encode_refusal(error))
    else:
        from homenode.show.explain import rejections_text

        error_console().print(rejections_text(error))


def _print(
    tuning: Tuning,
    why: Sequence[str],
    host: "Host | None",
    original: bytes | None,
    document: str,
    asked: PlanArguments,
) -> None:
    if asked.json:
        print_json(encode_plan(tuning.plan))
    elif not asked.quiet:
        print_explanation(tuning.plan, why, host, asked)
    else:
        note_critical(tuning.plan)
    if asked.diff:
        print_diff(original or b"", tuning.document, document, str(asked.output or "tuned"))


def note_critical(made: Plan) -> None:
    """Print what makes the exit code 1, and VMs that were not read, without the explanation."""
    from homenode.show.explain import finding_lines, unread_lines

    for line in (*finding_lines(made, ("critical",)), *unread_lines(made)):
        note(line)


def print_explanation(
    made: Plan, why: Sequence[str], host: "Host | None", asked: PlanArguments
) -> None:
    """Where the VM goes and why, for people."""
    from homenode.show.explain import explain

    shown = (
        error_console()
        if STANDARD_OUTPUT in (asked.output, asked.save_plan, asked.svg)
        else console()
    )
    shown.print(explain(made, host, whole=asked.explain, why=why))


def _write(
    tuning: Tuning, host: "Host | None", original: bytes | None, asked: PlanArguments, document: str
) -> list[str]:
    """Write what is wanted; what to say of it."""
    lines = []
    if asked.output is not None:
        lines += write_document(tuning, original, asked.output, permissions_of(document))
    return [*lines, *tuning.notes, *write_plan_files(tuning.plan, host, asked)]


def write_document(tuning: Tuning, original: bytes | None, output: Path, mode: int) -> list[str]:
    """The tuned document, checked against libvirt's schema where that is installed, with its
    original next to it; or to standard output. What to say of it.

    original: None = a new domain.
    """
    gap = refuse_new_errors(tuning.original, tuning.document, tuning.libvirt)
    lines = [] if gap is None else [f"not checked: {gap}"]
    if output == STANDARD_OUTPUT:
        print_document(tuning.document)
    elif original is None:
        write_bytes(output, tuning.document)
        lines.append(f"wrote {output}")
    else:
        lines.append(written(write_tuned(output, original, tuning.document, mode)))
    return lines


def written(saved: SavedOriginal) -> str:
    """What to say of a tuned document and its original."""
    return f"wrote {saved.output} (original in {saved.original}; homenode restore undoes it)"


def write_plan_files(made: Plan, host: "Host | None", asked: PlanArguments) -> list[str]:
    """The plan's document and its picture, where they are wanted. What to say of them."""
    if asked.save_plan is not None:
        write_text(asked.save_plan, encode_plan(made))
    if asked.svg is not None:
        assert host is not None, "manual mode was refused --svg before"
        from homenode.show.topology_map import topology_map

        write_text(asked.svg, topology_map(host, made))
    files = (one for one in (asked.save_plan, asked.svg) if one is not None)
    return [f"wrote {one}" for one in files if one != STANDARD_OUTPUT]
