"""homenode pool place, remove, pack, drain, defragment: where VMs go, or move. [I/O]"""

import gc
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import chain, islice
from pathlib import Path

from msgspec import structs
from msgspec.structs import replace

from homenode.cli.arguments.pool import (
    PoolDefragmentArguments,
    PoolDrainArguments,
    PoolPackArguments,
    PoolPlaceArguments,
    PoolRemoveArguments,
)
from homenode.cli.planning import check_tuned_output, write_document
from homenode.cli.pool_reading import (
    check_hosts,
    exit_with_failures,
    note_failures,
    planner_of,
    pool_named,
    read_flavours,
    read_the_pool,
)
from homenode.cli.terminal import (
    STANDARD_OUTPUT,
    check_can_write,
    console,
    error_console,
    note,
    permissions_of,
    print_json,
)
from homenode.cluster.pool.flavour import Flavour
from homenode.cluster.pool.hook import Hook
from homenode.cluster.pool.model import Pool, PoolHost
from homenode.cluster.pool.moves import MovePlan
from homenode.cluster.pool.moves import defragment as defragment_moves
from homenode.cluster.pool.moves import drain as drain_moves
from homenode.cluster.pool.pack import pack as pack_vms
from homenode.cluster.pool.pack import parse_requests
from homenode.cluster.pool.packing import (
    check_file_names,
    encode_packing,
    packing_text,
    read_packing,
    tuned_documents,
    write_packing,
)
from homenode.cluster.pool.place import PoolPlaces, RankedPlace, RefusedHosts
from homenode.cluster.pool.recorded import PLACEMENTS, PlacementRecord, placement_record
from homenode.decide.auto_layout import NotRecommended, settled
from homenode.decide.evidence.model import Evidence
from homenode.decide.evidence.sources import load_evidence
from homenode.doc import Doc
from homenode.errors import UNPLANNABLE, HostError, InputError, UsageError
from homenode.formats import encode
from homenode.input_files import input_lines, read_input
from homenode.plan.stored import domain_of_plan, encode_plan
from homenode.plan.tuning import tune
from homenode.show.explain import explain
from homenode.show.pool_text import defragment_text, drain_text, places_text
from homenode.vm.domain.read import read_vm
from homenode.vm.domain.schema import refuse_new_errors
from homenode.vm.model import Vm
from homenode.vm.plan_model import Unplannable
from homenode.vm.plan_options import PlanOptions, refuse_objective
from homenode.wording import command_line, operands, plural


def place(asked: PoolPlaceArguments) -> None:
    """Place the VM, or answer requests."""
    if asked.hook:
        given = (asked.document, asked.output)
        if any(one is not None for one in given) or asked.record or asked.count > 1 or asked.among:
            raise UsageError("--hook: expected requests on standard input, found a document too")
        answer(pool_named(asked.pool, ()), asked.flavours)
        return
    if asked.document is None:
        raise UsageError("pool place: expected a document, found none", hint="or --hook")
    refuse_objective(asked.options)
    if asked.gpu_model is not None and not asked.options.gpu_count:
        raise UsageError("--gpu-model: expected --gpus N with it, found none")
    document, options, sources = asked.document, asked.options, pool_named(asked.pool, ())

    if asked.output == STANDARD_OUTPUT and (asked.json or asked.count > 1):
        raise UsageError("-: expected one thing for standard output, found several")
    if asked.count == 1:
        check_can_write(asked.output, force=True)
        check_tuned_output(document, asked.output)
    original = read_input(document, "a domain document", hint="virsh dumpxml NAME > VM.xml")
    guest = read_vm(original, document)
    sizes = read_flavours(asked.flavours)
    evidence = None
    if options.layout == "auto":
        evidence = load_evidence(asked.results)
    with recording(sources) if asked.record else nullcontext() as record:
        pool = read_the_pool(sources)
        note_failures(pool)
        check_hosts(asked.among, pool)
        by_shape = _flavour_of_shapes(guest, options, pool, evidence, asked.gpu_model)
        placed = 0
        with planner_of(pool, sources) as planner:
            places = PoolPlaces(pool, sizes, planner)
            for number in range(1, asked.count + 1):
                name = guest.name if asked.count == 1 else f"{guest.name}-{number}"
                if not _place_one(asked, original, name, by_shape, places, record, number=number):
                    break
                placed = number
        if placed < asked.count:
            if asked.count > 1:
                note(f"placed {placed} of {asked.count}")
            raise SystemExit(UNPLANNABLE)
    if asked.count > 1:
        note(f"placed {asked.count} of {asked.count}")
    exit_with_failures(pool)


def _flavour_of_shapes(
    guest: Vm,
    options: PlanOptions,
    pool: Pool,
    evidence: Evidence | None,
    gpu_model: str | None,
) -> dict[int, Flavour]:
    """The VM on each kind of host; a kind for which no layout is recommended is left out."""
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
            name=guest.name,
            gpus=options.gpu_count or 0,
            gpu_model=gpu_model,
            options=own,
            guest=guest,
        )
    return found


def _place_one(
    asked: PoolPlaceArguments,
    original: bytes,
    name: str,
    by_shape: dict[int, Flavour],
    places: PoolPlaces,
    record: PlacementRecord | None,
    *,
    number: int,
) -> bool:
    """Whether a host takes it."""
    document = asked.document or "-"
    screen = error_console() if asked.output == STANDARD_OUTPUT else console()
    ranking = places.ranked(by_shape, vm=name, among=asked.among or None)
    first = list(islice(ranking, 3))
    if not first:
        refused = _refusals(places, by_shape, name, asked.among)
        has_addresses = any(
            not flavour.gpus and flavour.guest is not None and flavour.guest.hostdevs
            for flavour in by_shape.values()
        )
        hint = "--gpus N chooses GPUs on each host" if refused and has_addresses else None
        error_console().print(places_text(name, first, refused, hint))
    explained = number == 1 and not asked.json
    for one in chain(first, ranking):
        flavour = by_shape[one.host.shape]
        host = one.real_host
        copy = None if asked.count == 1 else name
        try:
            tuning = tune(original, document, flavour.options, host, copy_name=copy)
        except Unplannable as refused_there:
            note(f"{one.host.name}: {refused_there.message}")
            continue
        lines: list[str] = []
        output = _output_of(asked, name)
        if output is not None:
            given = original if asked.count == 1 else tuning.original
            lines += write_document(tuning, given, output, permissions_of(document))
        lines += tuning.notes if number == 1 else ()
        vm = structs.replace(domain_of_plan(tuning.plan), name=name)
        places.add(one.host.name, vm)
        if record is not None:
            record.add(one.host.name, vm)
            lines.append(f"recorded {name} on {one.host.name}")
        if asked.json:
            print_json(encode_plan(tuning.plan))
        elif explained:
            screen.print(places_text(name, first))
            screen.print(explain(tuning.plan, host))
        else:
            screen.print(f"  {name}: {one.host.name}", highlight=False)
        for line in lines:
            note(line)
        if not asked.json and number == asked.count:
            _note_next_step(one, output, asked)
        return True
    if first and explained:
        screen.print(places_text(name, first))
    return False


def _refusals(
    places: PoolPlaces, by_shape: dict[int, Flavour], vm: str, among: Sequence[str]
) -> tuple[RefusedHosts, ...]:
    """Why the hosts that may be chosen refuse the VM."""
    if among:
        hosts = tuple(host for host in places.pool().hosts if host.name in among)
        places = PoolPlaces(replace(places.pool(), hosts=hosts), (), places.planner)
    return places.refusals(by_shape, vm=vm)


def _note_next_step(place: RankedPlace, output: Path | None, asked: PoolPlaceArguments) -> None:
    if output is None:
        note("next: -o FILE writes the tuned document")
    elif asked.count > 1:
        note(f"next: define each document of {asked.output} on its host")
    elif output != STANDARD_OUTPUT:
        uri = place.host.libvirt_uri
        note(f"next: {command_line('virsh', '-c', uri, 'define', output)}")


def _output_of(asked: PoolPlaceArguments, name: str) -> Path | None:
    """The file for the document of a VM. Raises InputError, HostError."""
    out = asked.output
    if out is None or asked.count == 1:
        return out
    if not name.replace("-", "").replace("_", "").replace(".", "").isalnum():
        raise InputError(f"VM {name!r}: expected a name that can be a file's, found another")
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise HostError(f"{out}: expected a folder, found: {error.strerror}") from None
    return out / f"{name}.xml"


def answer(sources: Sequence[str], flavours: Path | None) -> None:
    """Lines of JSON in, lines of JSON out, until the end of standard input."""
    sizes = read_flavours(flavours)
    pool = read_the_pool(sources)
    note_failures(pool)
    with planner_of(pool, sources) as planner:
        hook = Hook(PoolPlaces(pool, sizes, planner), sizes)
        hook.prepare()
    gc.freeze()  # what is kept until the end is not looked through again at requests
    for line in input_lines():
        if line.strip():
            print_json(hook.answer(line))
            hook.tidy()
    exit_with_failures(pool)


def recording(sources: Sequence[str]) -> AbstractContextManager[PlacementRecord]:
    """The record of the pool's folder. It is locked while the pool is read and placed on, so that
    commands that run at once do not give one GPU to several VMs."""
    folders = [Path(source) for source in sources if Path(source).is_dir()]
    if len(folders) != 1 or len(sources) != 1:
        raise UsageError(
            f"--record: expected one pool that is a folder, found {', '.join(sources)}",
            hint="homenode pool capture writes one",
        )
    return placement_record(folders[0], note_that_it_waits)


def note_that_it_waits() -> None:
    note("waiting for another homenode that records placements in this pool")


def remove(asked: PoolRemoveArguments) -> None:
    """Remove the records of VMs."""
    names, packing, folder = asked.vms, asked.packing, asked.pool
    if not names and packing is None:
        raise UsageError("pool remove: expected names of VMs or --packing DIR, found neither")
    if not folder.is_dir():
        raise InputError(f"{folder}: expected a pool's folder, found none")
    wanted = dict.fromkeys([*names, *(() if packing is None else read_packing(packing))])
    removed: dict[str, tuple[str, ...]] = {}
    if (folder / PLACEMENTS).exists():
        with placement_record(folder, note_that_it_waits) as record:
            removed = {vm: hosts for vm in wanted if (hosts := record.remove(vm))}
    for vm, hosts in removed.items():
        note(f"removed {vm} from {', '.join(hosts)}")
    missing = [vm for vm in wanted if vm not in removed]
    if missing:
        found = ", ".join(map(repr, missing[:8])) + (
            f" and {len(missing) - 8} more" * (len(missing) > 8)
        )
        raise InputError(
            f"{folder}: expected recorded VMs, found no record of {found}",
            hint=command_line("homenode", "pool", "vms", folder) + " lists them as placed",
        )


MOST_NAMES = 8
"""VMs that a command to remove them names; more are named by their packing."""


def pack(asked: PoolPackArguments) -> None:
    """Place all VMs, and write their plans."""
    requests, output, record = asked.requests, asked.output, asked.record
    sources = pool_named(asked.pool, ())

    def read_document(name: str) -> bytes:
        return read_input(requests.parent / name, "a domain document")

    text = read_input(requests, "requests as TOML").decode("utf-8", "replace")
    wanted = parse_requests(text, str(requests), read_document)
    check_file_names(name for request in wanted for name in request.names)
    with recording(sources) if record else nullcontext() as journal:
        pool = read_the_pool(sources)
        note_failures(pool)
        packing = pack_vms(pool, wanted, seconds=asked.time_limit)
        tuned = tuned_documents(packing, pool)
        gaps = {
            refuse_new_errors(one.original, one.document, one.libvirt) for one in tuned.values()
        }
        write_packing(output, packing, tuned)
        if journal is not None:
            for vm in packing.vms:
                journal.add(vm.host, domain_of_plan(vm.plan))
    for text in dict.fromkeys(text for one in tuned.values() for text in one.notes):
        note(text)
    for gap in sorted(gap for gap in gaps if gap is not None):
        note(f"not checked: {gap}")
    if asked.json:
        print_json(encode_packing(packing))
    else:
        console().print(packing_text(packing), highlight=False)
        documents = f", {plural(len(tuned), 'document')}" if tuned else ""
        note(f"wrote {output}: {plural(len(packing.vms), 'plan')}{documents} and packing.json")
    if record and packing.vms:
        _note_recorded([vm.name for vm in packing.vms], sources[0], output)
    if tuned and not asked.json:
        note(f"next: define each document of {output} on the host that is listed with its VM")
    if packing.unplaced:
        raise SystemExit(UNPLANNABLE)
    exit_with_failures(pool)


def _note_recorded(names: Sequence[str], folder: str, output: Path) -> None:
    """That the VMs count now, and the command that removes their records."""
    by_name = len(names) <= MOST_NAMES
    which = operands(*names) if by_name else ("--packing", output)
    undo = command_line("homenode", "pool", "remove", "--pool", folder, *which)
    note(f"recorded {plural(len(names), 'VM')} in {folder}; to remove them: {undo}")


def drain(asked: PoolDrainArguments) -> None:
    """Print the moves that empty a host."""
    host, sources = asked.host, pool_named(asked.pool, ())

    sizes = read_flavours(asked.flavours)
    pool = read_the_pool(sources)
    note_failures(pool)
    with planner_of(pool, sources) as planner:
        plan = drain_moves(pool, host, sizes, planner)
    _print_moves(plan, drain_text(plan, host, pool, sources), pool, as_json=asked.json)


def defragment(asked: PoolDefragmentArguments) -> None:
    """Print the moves after which more large VMs fit."""
    name, sources = asked.flavour, pool_named(asked.pool, asked.sources)

    sizes = read_flavours(asked.flavours)
    wanted = max(sizes, key=lambda one: one.gpus)
    if name is not None:
        found = [one for one in sizes if one.name == name]
        if not found:
            names = ", ".join(one.name for one in sizes)
            raise UsageError(f"--for: expected one of {names}, found {name!r}")
        wanted = found[0]
    pool = read_the_pool(sources)
    note_failures(pool)
    with planner_of(pool, sources) as planner:
        plan = defragment_moves(pool, wanted, sizes, planner, most=asked.most)
    text = defragment_text(plan, wanted.name, pool, sources, asked.most)
    _print_moves(plan, text, pool, as_json=asked.json)


def _print_moves(plan: MovePlan, text: Doc, pool: Pool, *, as_json: bool) -> None:
    if as_json:
        print_json(encode("pool-moves", plan))
    else:
        console().print(text)
    if plan.stuck:
        raise SystemExit(UNPLANNABLE)
    exit_with_failures(pool)
