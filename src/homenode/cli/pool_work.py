"""What the commands of `homenode pool` do with their arguments. [I/O]"""

import gc
import sys
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from itertools import chain, islice
from pathlib import Path
from typing import TYPE_CHECKING

from homenode.cli.terminal import (
    LARGEST_FILE_BYTES,
    STANDARD_OUTPUT,
    check_can_write,
    console,
    error_console,
    note,
    permissions_of,
    print_file,
    print_json,
    read_file,
    write_text,
)
from homenode.errors import InputError, UsageError
from homenode.plan.options import PlanOptions
from homenode.pool.flavour import Flavour, default_flavours, parse_flavours
from homenode.pool.model import Pool, PoolHost
from homenode.pool.sources import POOL_FILE, Progress, load_pool
from homenode.wording import command_line, did_you_mean, plural

if TYPE_CHECKING:
    from rich.console import RenderableType

    from homenode.evidence.model import Evidence
    from homenode.plan.guest import Guest
    from homenode.pool.moves import MovePlan
    from homenode.pool.place import PoolPlaces, RankedPlace, RefusedHosts
    from homenode.pool.planner import Planner
    from homenode.pool.recorded import PlacementRecord
    from homenode.pool.scheduler import Scheduler


@contextmanager
def progress(what: str) -> Iterator[Progress]:
    """A bar on a terminal; nothing elsewhere."""
    if not sys.stderr.isatty():
        yield lambda done, total: None
        return
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn
    from rich.progress import Progress as Bar

    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn()
    with Bar(*columns, console=error_console(), transient=True) as bar:
        task = bar.add_task(what, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


def read_the_pool(sources: Sequence[str]) -> Pool:
    """The pool; what was left out goes to standard error."""
    with progress("reading hosts") as show_progress:
        return load_pool(sources, show_progress)


@contextmanager
def planner_of(pool: Pool, sources: Sequence[str]) -> "Iterator[Planner]":
    """The planner of a pool. What earlier commands have worked out of a pool's folder is read from
    there, and what this one adds is written there at the end."""
    from homenode.pool.answers_file import read_answers, write_answers
    from homenode.pool.planner import Planner

    folder = Path(sources[0])
    if len(sources) > 1 or not (folder / POOL_FILE).is_file():
        yield Planner(pool)
        return
    answers = read_answers(folder)
    yield Planner(pool, answers)
    write_answers(folder, answers)


def note_failures(pool: Pool) -> None:
    for failure in pool.failures:
        note(f"left out {failure.source}: {failure.reason}")


def exit_with_failures(pool: Pool) -> None:
    """Exit with 1 where hosts were left out."""
    if pool.failures:
        raise SystemExit(1)


def read_flavours(path: Path | None) -> tuple[Flavour, ...]:
    if path is None:
        return default_flavours()
    content = read_file(path, "a flavours.toml")
    return parse_flavours(content.decode("utf-8", "replace"), str(path))


def show(
    sources: Sequence[str], flavours: Path | None, form: str, page: Path | None, *, everything: bool
) -> None:
    from homenode.pool.outlook import outlook
    from homenode.report import pool_text

    check_can_write(page)
    sizes = read_flavours(flavours)
    pool = read_the_pool(sources)
    with planner_of(pool, sources) as planner, progress("planning") as show_progress:
        found = outlook(pool, sizes, planner, show_progress)
    if form == "json":
        from homenode.formats import encode

        print_json(encode("pool", found))
    elif form == "csv":
        print_file(pool_text.pool_csv(found))
    elif form == "prometheus":
        print_file(pool_text.pool_prometheus(found))
    else:
        console().print(pool_text.pool_text(found, everything=everything))
    if page is not None:
        from homenode.report.pool_page import pool_page

        write_text(page, pool_page(pool, found))
        note(f"wrote {page}")
    if form != "text":
        note_failures(pool)
    exit_with_failures(pool)


def _check_hosts(names: Sequence[str], pool: Pool) -> None:
    """Raises UsageError for a host of --on that the pool does not have."""
    known = {host.name for host in pool.hosts}
    for name in names:
        if name not in known:
            raise UsageError(
                f"--on: expected a host of the pool, found {name!r}",
                hint=f"{did_you_mean(name, known)}homenode pool show POOL --all lists them",
            )


def list_vms(sources: Sequence[str], hosts: tuple[str, ...], *, as_json: bool) -> None:
    from homenode.pool.model import pool_vms

    pool = read_the_pool(sources)
    note_failures(pool)
    _check_hosts(hosts, pool)
    found = pool_vms(pool, hosts)
    if as_json:
        from homenode.formats import encode

        print_json(encode("pool-vms", found))
    else:
        from homenode.report.pool_text import vms_text

        console().print(vms_text(found))
    exit_with_failures(pool)


def capture(hosts: Path, output: Path, jobs: int, timeout_s: float, *, again: bool) -> None:
    from homenode.pool.capture import capture_pool
    from homenode.pool.outlook import outlook

    content = read_file(hosts, "a list of hosts")
    with progress("reading hosts") as show_progress:
        done = capture_pool(
            content.decode("utf-8", "replace"),
            str(hosts),
            output,
            show_progress,
            jobs=jobs,
            timeout_s=timeout_s,
            again=again,
        )
    if done.pool.hosts:
        # Later commands find what they need of hosts that have not changed.
        sources = [str(output)]
        pool = load_pool(sources)
        with planner_of(pool, sources) as planner, progress("planning") as show_progress:
            outlook(pool, default_flavours(), planner, show_progress)
    note_failures(done.pool)
    note(
        f"wrote {output}: {len(done.pool.hosts)} hosts, {done.read} read now, "
        f"{len(done.pool.failures)} failed"
    )
    if done.pool.hosts:
        note(f"next: {command_line('homenode', 'pool', 'show', output)}")
    exit_with_failures(done.pool)


@dataclass(frozen=True, slots=True)
class PlaceOutputs:
    """See the options of the same names."""

    count: int
    document: Path | None
    record: bool
    json: bool
    among: tuple[str, ...] = ()
    gpu_model: str | None = None


def answer(sources: Sequence[str], flavours: Path | None) -> None:
    """Lines of JSON in, lines of JSON out, until the end of standard input."""
    from homenode.pool.hook import Hook
    from homenode.pool.place import PoolPlaces

    sizes = read_flavours(flavours)
    pool = read_the_pool(sources)
    note_failures(pool)
    with planner_of(pool, sources) as planner:
        hook = Hook(PoolPlaces(pool, sizes, planner), sizes)
        hook.prepare()
    gc.freeze()  # what is kept until the end is not looked through again at requests
    for line in sys.stdin.buffer:
        if line.strip():
            print_json(hook.answer(line))
            hook.tidy()
    exit_with_failures(pool)


def _flavour_of_shapes(
    guest: "Guest",
    options: PlanOptions,
    pool: Pool,
    evidence: "Evidence | None",
    gpu_model: str | None,
) -> dict[int, Flavour]:
    """The VM on each kind of host; a kind for which no layout is recommended is left out."""
    from homenode.auto_layout import NotRecommended, settled

    found = {}
    names: dict[int, PoolHost] = {}
    for host in pool.hosts:
        names.setdefault(host.shape, host)
    for number, one in names.items():
        own = options
        if evidence is not None:
            try:
                own = settled(guest, options, pool.host(one), evidence).options
            except NotRecommended:
                continue
        found[number] = Flavour(
            guest.name, options.gpu_count or 0, gpu_model=gpu_model, options=own, guest=guest
        )
    return found


def place(
    document: str,
    sources: Sequence[str],
    options: PlanOptions,
    flavours: Path | None,
    results: tuple[str, ...],
    outputs: PlaceOutputs,
) -> None:
    from homenode.cli.planning import check_tuned_output
    from homenode.domain.read import read_guest
    from homenode.pool.place import PoolPlaces

    if outputs.document == STANDARD_OUTPUT and (outputs.json or outputs.count > 1):
        raise UsageError("-: expected one thing for standard output, found several")
    if outputs.count == 1:
        check_can_write(outputs.document, force=True)
        check_tuned_output(document, outputs.document)
    original = (
        sys.stdin.buffer.read(LARGEST_FILE_BYTES + 1)
        if document == "-"
        else read_file(Path(document), "a domain document", hint="virsh dumpxml NAME > VM.xml")
    )
    guest = read_guest(original, document)
    sizes = read_flavours(flavours)
    evidence = None
    if options.layout == "auto":
        from homenode.evidence.sources import load_evidence

        evidence = load_evidence(results)
    with _recording(sources) if outputs.record else nullcontext() as record:
        pool = read_the_pool(sources)
        note_failures(pool)
        _check_hosts(outputs.among, pool)
        by_shape = _flavour_of_shapes(guest, options, pool, evidence, outputs.gpu_model)
        placed = 0
        with planner_of(pool, sources) as planner:
            places = PoolPlaces(pool, sizes, planner)
            for number in range(1, outputs.count + 1):
                name = guest.name if outputs.count == 1 else f"{guest.name}-{number}"
                if not _place_one(
                    original, document, name, by_shape, places, outputs, record, number
                ):
                    break
                placed = number
        if placed < outputs.count:
            if outputs.count > 1:
                note(f"placed {placed} of {outputs.count}")
            raise SystemExit(4)
    if outputs.count > 1:
        note(f"placed {outputs.count} of {outputs.count}")
    exit_with_failures(pool)


def _place_one(
    original: bytes,
    document: str,
    name: str,
    by_shape: dict[int, Flavour],
    places: "PoolPlaces",
    outputs: PlaceOutputs,
    record: "PlacementRecord | None",
    number: int,
) -> bool:
    """Whether a host takes it."""
    from homenode.cli.planning import write_document
    from homenode.plan.model import Unplannable
    from homenode.plan.stored import domain_of_plan, encode_plan
    from homenode.report.pool_places_text import places_text
    from homenode.tuning import tune

    screen = error_console() if outputs.document == STANDARD_OUTPUT else console()
    ranking = places.ranked(by_shape, vm=name, among=outputs.among or None)
    first = list(islice(ranking, 3))
    if not first or (number == 1 and not outputs.json):
        refused = () if first else _refusals(places, by_shape, name, outputs.among)
        has_addresses = any(
            not flavour.gpus and flavour.guest is not None and flavour.guest.hostdevs
            for flavour in by_shape.values()
        )
        hint = "--gpus N chooses GPUs on each host" if refused and has_addresses else None
        (screen if first else error_console()).print(places_text(first, refused, hint))
    for one in chain(first, ranking):
        flavour = by_shape[one.host.shape]
        host = places.planner.real_host(one.host, flavour)
        copy = None if outputs.count == 1 else name
        try:
            tuning = tune(original, document, flavour.options, host, copy_name=copy)
        except Unplannable as refused_there:
            note(f"{one.host.name}: {refused_there.message}")
            continue
        if outputs.json:
            print_json(encode_plan(tuning.plan))
        elif number == 1:
            from homenode.plan.words.explain import explain
            from homenode.report.plan_text import plan_text

            screen.print(plan_text(explain(tuning.plan, host)))
        else:
            screen.print(f"  {name}: {one.host.name}", highlight=False)
        output = _output_of(outputs, name)
        if output is not None:
            given = original if outputs.count == 1 else tuning.original
            write_document(tuning, given, output, permissions_of(document))
        for known in tuning.notes if number == 1 else ():
            note(known)
        vm = replace(domain_of_plan(tuning.plan), name=name)
        places.add(one.host.name, vm)
        if record is not None:
            record.add(one.host.name, vm)
            note(f"recorded {name} on {one.host.name}")
        if not outputs.json and number == outputs.count:
            _note_next_step(one, output, outputs)
        return True
    return False


def _refusals(
    places: "PoolPlaces", by_shape: dict[int, Flavour], vm: str, among: Sequence[str]
) -> "tuple[RefusedHosts, ...]":
    """Why the hosts that may be chosen refuse the VM."""
    from homenode.pool.place import PoolPlaces

    if among:
        hosts = tuple(host for host in places.pool().hosts if host.name in among)
        places = PoolPlaces(replace(places.pool(), hosts=hosts), (), places.planner)
    return places.refusals(by_shape, vm=vm)


def _note_next_step(place: "RankedPlace", output: Path | None, outputs: PlaceOutputs) -> None:
    if output is None:
        note("next: -o FILE writes the tuned document")
    elif outputs.count > 1:
        note(f"next: define each document of {outputs.document} on its host")
    elif output != STANDARD_OUTPUT:
        uri = place.host.libvirt_uri
        note(f"next: {command_line('virsh', '-c', uri, 'define', output)}")


def _output_of(outputs: PlaceOutputs, name: str) -> Path | None:
    """The file for the document of a VM. Raises InputError, HostError."""
    from homenode.errors import HostError

    out = outputs.document
    if out is None or outputs.count == 1:
        return out
    if not name.replace("-", "").replace("_", "").replace(".", "").isalnum():
        raise InputError(f"VM {name!r}: expected a name that can be a file's, found another")
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise HostError(f"{out}: expected a folder, found: {error.strerror}") from None
    return out / f"{name}.xml"


def _recording(sources: Sequence[str]) -> "AbstractContextManager[PlacementRecord]":
    """The record of the pool's folder. It is locked while the pool is read and placed on, so that
    commands that run at once do not give one GPU to several VMs."""
    from homenode.pool.recorded import placement_record

    folders = [Path(source) for source in sources if Path(source).is_dir()]
    if len(folders) != 1 or len(sources) != 1:
        raise UsageError(
            f"--record: expected one pool that is a folder, found {', '.join(sources)}",
            hint="homenode pool capture writes one",
        )
    return placement_record(folders[0], _note_that_it_waits)


def _note_that_it_waits() -> None:
    note("waiting for another homenode that records placements in this pool")


def remove(vm: str, folder: Path) -> None:
    from homenode.pool.recorded import PLACEMENTS, placement_record

    hosts: tuple[str, ...] = ()
    if (folder / PLACEMENTS).exists():
        with placement_record(folder, _note_that_it_waits) as record:
            hosts = record.remove(vm)
    if not hosts:
        if not folder.is_dir():
            raise InputError(f"{folder}: expected a pool's folder, found none")
        raise InputError(
            f"{folder}: expected a recorded VM {vm!r}, found none",
            hint=command_line("homenode", "pool", "vms", folder) + " lists them as placed",
        )
    note(f"removed {vm} from {', '.join(hosts)}")


def pack(
    requests: Path, sources: Sequence[str], output: Path, seconds: float, *, as_json: bool
) -> None:
    from homenode.domain.schema import refuse_new_errors
    from homenode.pool.pack import pack as pack_vms
    from homenode.pool.pack import parse_requests
    from homenode.pool.packing import (
        check_file_names,
        encode_packing,
        packing_text,
        tuned_documents,
        write_packing,
    )

    def read_document(name: str) -> bytes:
        return read_file(requests.parent / name, "a domain document")

    text = read_file(requests, "requests as TOML").decode("utf-8", "replace")
    wanted = parse_requests(text, str(requests), read_document)
    check_file_names(name for request in wanted for name in request.names)
    pool = read_the_pool(sources)
    note_failures(pool)
    packing = pack_vms(pool, wanted, seconds=seconds)
    tuned = tuned_documents(packing, pool)
    gaps = {
        refuse_new_errors(one.original, one.document, one.libvirt) for one in tuned.values()
    } - {None}
    write_packing(output, packing, tuned)
    for text in dict.fromkeys(text for one in tuned.values() for text in one.notes):
        note(text)
    for gap in sorted(gap for gap in gaps if gap is not None):
        note(f"not checked: {gap}")
    if as_json:
        print_json(encode_packing(packing))
    else:
        console().print(packing_text(packing), highlight=False)
        documents = f", {plural(len(tuned), 'document')}" if tuned else ""
        note(f"wrote {output}: {plural(len(packing.vms), 'plan')}{documents} and packing.json")
        if tuned:
            note(f"next: define each document of {output} on the host that is listed with its VM")
    if packing.unplaced:
        raise SystemExit(4)
    exit_with_failures(pool)


def drain(host: str, sources: Sequence[str], flavours: Path | None, *, as_json: bool) -> None:
    from homenode.pool.moves import drain as drain_moves
    from homenode.report.pool_places_text import drain_text

    sizes = read_flavours(flavours)
    pool = read_the_pool(sources)
    note_failures(pool)
    plan = drain_moves(pool, host, sizes)
    _print_moves(plan, drain_text(plan, host, pool, sources), as_json=as_json)


def defragment(
    sources: Sequence[str],
    flavours: Path | None,
    name: str | None,
    most: int,
    *,
    as_json: bool,
) -> None:
    from homenode.pool.moves import defragment as defragment_moves
    from homenode.report.pool_places_text import defragment_text

    sizes = read_flavours(flavours)
    wanted = max(sizes, key=lambda one: one.gpus)
    if name is not None:
        found = [one for one in sizes if one.name == name]
        if not found:
            names = ", ".join(one.name for one in sizes)
            raise UsageError(f"--for: expected one of {names}, found {name!r}")
        wanted = found[0]
    pool = read_the_pool(sources)
    note_failures(pool)
    plan = defragment_moves(pool, wanted, sizes, most=most)
    text = defragment_text(plan, wanted.name, pool, sources, most)
    _print_moves(plan, text, as_json=as_json)


def _print_moves(plan: "MovePlan", text: "RenderableType", *, as_json: bool) -> None:
    if as_json:
        from homenode.formats import encode

        print_json(encode("pool-moves", plan))
    else:
        console().print(text)
    if plan.stuck:
        raise SystemExit(4)


def export(sources: Sequence[str], scheduler: "Scheduler", flavours: Path | None) -> None:
    from homenode.pool.export import NEXT_STEP, unnamed
    from homenode.pool.export import export as export_text
    from homenode.pool.outlook import outlook

    sizes = read_flavours(flavours)
    pool = read_the_pool(sources)
    note_failures(pool)
    found = outlook(pool, sizes)
    print_file(export_text(found, scheduler))
    note(f"next: {NEXT_STEP[scheduler]}")
    left_out = unnamed(found, scheduler)
    for name in left_out:
        note(f"left out {name}: expected a name that {scheduler} can have")
    if left_out:
        raise SystemExit(1)
    exit_with_failures(pool)
