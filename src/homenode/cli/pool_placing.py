"""homenode pool place, remove, host: where VMs go. [I/O]"""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from itertools import chain, islice
from pathlib import Path

from msgspec import structs

from homenode.cli.arguments.pool import (
    PoolHostArguments,
    PoolPlaceArguments,
    PoolRemoveArguments,
)
from homenode.cli.planning import check_tuned_output, choose_by, note_sick_links, write_document
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
from homenode.cluster.pool.ledger import Ledger, has_ledger
from homenode.cluster.pool.model import Pool, PoolHost
from homenode.cluster.pool.place import PoolPlaces, RankedPlace
from homenode.cluster.pool.reservations import Reservation, identity_of, seen_in
from homenode.errors import UNPLANNABLE, HostError, InputError, UsageError
from homenode.input_files import read_input
from homenode.machine.pci import canonical_uuid
from homenode.plan.auto import Choose, resolve_layout
from homenode.plan.stored import domain_of_plan, encode_plan
from homenode.plan.tuning import tune
from homenode.show.explain import explain
from homenode.show.pool_text import places_text
from homenode.vm.domain.copy import copied_uuid
from homenode.vm.domain.read import read_vm
from homenode.vm.model import Vm
from homenode.vm.plan_model import Unplannable
from homenode.vm.plan_options import PlanOptions, refuse_objective
from homenode.wording import command_line


def place(asked: PoolPlaceArguments) -> None:
    """Place the VM."""
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
    choose = choose_by(asked.results)
    with recording(sources) if asked.record else nullcontext() as ledger:
        pool = read_the_pool(sources, ledger)
        note_failures(pool)
        check_hosts(asked.among, pool)
        by_shape = _flavour_of_shapes(guest, options, pool, choose, asked.gpu_model)
        placed = 0
        with planner_of(pool, sources) as planner:
            places = PoolPlaces(pool, sizes, planner)
            for number in range(1, asked.count + 1):
                name = guest.name if asked.count == 1 else f"{guest.name}-{number}"
                if not _place_one(asked, original, name, by_shape, places, ledger, number=number):
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
    choose: Choose | None,
    gpu_model: str | None,
) -> dict[int, Flavour]:
    """The VM on each kind of host."""
    found = {}
    names: dict[int, PoolHost] = {}
    for host in pool.hosts:
        names.setdefault(host.shape, host)
    for number, one in names.items():
        own = resolve_layout(guest, options, pool.host(one), choose).options
        found[number] = Flavour(
            name=guest.name,
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
    ledger: Ledger | None,
    *,
    number: int,
) -> bool:
    """Whether a host takes it."""
    document = asked.document
    screen = error_console() if asked.output == STANDARD_OUTPUT else console()
    guest = next(iter(by_shape.values())).guest
    uuid = None if guest is None or guest.uuid is None else canonical_uuid(guest.uuid)
    if uuid is not None and asked.count > 1:
        uuid = copied_uuid(uuid, name)
    known = None if ledger is None else ledger.find(name, uuid, asked.owner)
    own = known.identity if known else identity_of(name, uuid, asked.owner)
    rules = known.rules if known and asked.rules.is_free else asked.rules
    among = asked.among or None
    ranking = places.ranked(by_shape, vm=own, among=among, rules=rules)
    first = list(islice(ranking, 3))
    if not first:
        refused = places.refusals(by_shape, vm=own, among=among, rules=rules)
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
        if number == 1:
            note_sick_links(host, asked.options)
        lines: list[str] = []
        output = _output_of(asked, name)
        if output is not None:
            given = original if asked.count == 1 else tuning.original
            lines += write_document(tuning, given, output, permissions_of(document))
        lines += tuning.notes if number == 1 else ()
        vm = structs.replace(domain_of_plan(tuning.plan), name=name, uuid=own.uuid)
        reservation = Reservation(
            host=one.host.name,
            vm=vm,
            owner=asked.owner,
            by_name=uuid is None and (known is None or known.by_name),
            rules=rules,
            seen=seen_in(places.pool(), own),
            expires_at_s=None if asked.ttl_s is None else time.time() + asked.ttl_s,
        )
        places.add(one.host.name, vm, rules)
        if ledger is not None:
            ledger.reserve(reservation)
            lines += _recorded(reservation, known)
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


def _recorded(one: Reservation, known: Reservation | None) -> Iterator[str]:
    """What was reserved, and where the VM counts besides or no longer."""
    name = one.vm.name
    yield f"recorded {name} on {one.host}"
    if known is not None and one.by_name:
        yield f"{name} has no UUID: it counts as the VM of this name that was recorded before"
    elsewhere = [host for host, vm in one.seen if vm.running and host != one.host]
    for host in elsewhere:
        yield f"{name} runs on {host}, and counts there too until a capture shows it moved"
    if known is not None and known.host not in (one.host, *elsewhere):
        yield f"{name} no longer counts on {known.host}"


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


def folder_of(sources: Sequence[str]) -> Path | None:
    """The folder that a pool is, in which there can be a ledger."""
    return Path(sources[0]) if len(sources) == 1 and Path(sources[0]).is_dir() else None


@contextmanager
def recording(sources: Sequence[str]) -> Iterator[Ledger]:
    """The ledger of the pool's folder. It is locked while the pool is read and placed on, so that
    commands that run at once do not give one GPU to several VMs."""
    folder = folder_of(sources)
    if folder is None:
        raise UsageError(
            f"--record: expected one pool that is a folder, found {', '.join(sources)}",
            hint="homenode pool capture writes one",
        )
    with Ledger(folder) as ledger, ledger.writing(note_that_it_waits):
        yield ledger


def note_that_it_waits() -> None:
    note("waiting for another homenode that records placements in this pool")


def remove(asked: PoolRemoveArguments) -> None:
    """Remove the records of VMs."""
    folder = asked.pool
    if not asked.vms:
        raise UsageError("pool remove: expected names of VMs, found none")
    if not folder.is_dir():
        raise InputError(f"{folder}: expected a pool's folder, found none")
    wanted = dict.fromkeys(asked.vms)
    removed: dict[str, str] = {}
    if has_ledger(folder):
        with Ledger(folder) as ledger, ledger.writing(note_that_it_waits):
            for vm in wanted:
                one = ledger.find(vm, canonical_uuid(vm), asked.owner)
                if one is not None:
                    ledger.release(one)
                    removed[vm] = one.host
    for vm, host in removed.items():
        note(f"removed {vm} from {host}")
    missing = [vm for vm in wanted if vm not in removed]
    if missing:
        found = ", ".join(map(repr, missing[:8])) + (
            f" and {len(missing) - 8} more" * (len(missing) > 8)
        )
        raise InputError(
            f"{folder}: expected recorded VMs, found no record of {found}",
            hint=command_line("homenode", "pool", "vms", folder) + " lists them as placed",
        )


def mark_hosts(asked: PoolHostArguments) -> None:
    """Write down whether the hosts take VMs."""
    sources = (str(asked.pool),)
    with recording(sources) as ledger:
        check_hosts(asked.hosts, read_the_pool(sources, ledger))
        for host in asked.hosts:
            ledger.set_host(host, asked.state)
    for host in asked.hosts:
        note(f"{host} is {asked.state}")
