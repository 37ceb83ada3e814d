"""Commands of `homenode pool` that plan many VMs together: pack, drain, defragment. [I/O]"""

from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path

from homenode.cli.arguments.pool import (
    PoolDefragmentArguments,
    PoolDrainArguments,
    PoolPackArguments,
)
from homenode.cli.pool_placing import recording
from homenode.cli.pool_reading import (
    exit_with_failures,
    note_failures,
    planner_of,
    pool_named,
    read_flavours,
    read_the_pool,
)
from homenode.cli.terminal import console, note, print_json
from homenode.cluster.pool.model import Pool
from homenode.cluster.pool.moves import MovePlan
from homenode.cluster.pool.moves import defragment as defragment_moves
from homenode.cluster.pool.moves import drain as drain_moves
from homenode.cluster.pool.pack import pack as pack_vms
from homenode.cluster.pool.pack import parse_requests
from homenode.cluster.pool.packing import (
    check_file_names,
    encode_packing,
    packing_text,
    tuned_documents,
    write_packing,
)
from homenode.doc import Doc
from homenode.errors import UNPLANNABLE, UsageError
from homenode.formats import encode
from homenode.input_files import read_input
from homenode.plan.stored import domain_of_plan
from homenode.show.pool_text import defragment_text, drain_text
from homenode.vm.domain.schema import refuse_new_errors
from homenode.wording import command_line, operands, plural

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
