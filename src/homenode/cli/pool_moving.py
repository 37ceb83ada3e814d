"""homenode pool drain, defragment: which VMs move where, and their moves. [I/O]"""

from collections.abc import Callable, Sequence
from contextlib import nullcontext

from homenode.cli.arguments.pool import MoveOptions, PoolDefragmentArguments, PoolDrainArguments
from homenode.cli.pool_placing import folder_of, recording
from homenode.cli.pool_reading import (
    check_hosts,
    exit_with_failures,
    note_failures,
    planner_of,
    pool_named,
    read_flavours,
    read_the_pool,
)
from homenode.cli.terminal import check_can_ask, confirm, console, note, print_json
from homenode.cluster.pool.ledger import Ledger
from homenode.cluster.pool.model import Pool
from homenode.cluster.pool.moves import MovePlan, Staying
from homenode.cluster.pool.moves import defragment as defragment_moves
from homenode.cluster.pool.moves import drain as drain_moves
from homenode.cluster.pool.planner import Planner
from homenode.cluster.pool.rules import Availability
from homenode.doc import Doc
from homenode.errors import FINDINGS, UNPLANNABLE, UsageError
from homenode.formats import encode
from homenode.show.pool_text import MovesFor, defragment_text, drain_text
from homenode.wording import command_line, plural

Find = Callable[[Pool, Planner, Staying], MovePlan]


def drain(asked: PoolDrainArguments) -> None:
    """Print the moves that empty a host, or carry them out."""
    host, sources = asked.host, pool_named(asked.pool, ())
    sizes = read_flavours(asked.flavours)

    def find(pool: Pool, planner: Planner, staying: Staying) -> MovePlan:
        return drain_moves(pool, host, sizes, planner, staying=staying)

    def text(plan: MovePlan, pool: Pool, use: MovesFor) -> Doc:
        return drain_text(plan, host, pool, use)

    def close(ledger: Ledger) -> None:
        ledger.set_host(host, Availability.DRAINING)
        opened = ("host", host, "--state", "open", "--pool", sources[0])
        undo = command_line("homenode", "pool", *opened)
        note(f"{host} takes no VM any more; to open it again: {undo}")

    _Moves(sources, asked.moving, find, text, close, as_json=asked.json).run()


def defragment(asked: PoolDefragmentArguments) -> None:
    """Print the moves after which more large VMs fit, or carry them out."""
    name, sources = asked.flavour, pool_named(asked.pool, asked.sources)
    sizes = read_flavours(asked.flavours)
    wanted = max(sizes, key=lambda one: one.gpus)
    if name is not None:
        found = [one for one in sizes if one.name == name]
        if not found:
            names = ", ".join(one.name for one in sizes)
            raise UsageError(f"--for: expected one of {names}, found {name!r}")
        wanted = found[0]

    def find(pool: Pool, planner: Planner, staying: Staying) -> MovePlan:
        return defragment_moves(pool, wanted, sizes, planner, most=asked.most, staying=staying)

    def text(plan: MovePlan, pool: Pool, use: MovesFor) -> Doc:
        return defragment_text(plan, wanted.name, pool, use, asked.most)

    _Moves(sources, asked.moving, find, text, as_json=asked.json).run()


class _Moves:
    """What both commands do. close: writes down that a host takes no VM any more."""

    def __init__(
        self,
        sources: Sequence[str],
        moving: MoveOptions,
        find: Find,
        text: Callable[[MovePlan, Pool, MovesFor], Doc],
        close: Callable[[Ledger], None] | None = None,
        *,
        as_json: bool,
    ) -> None:
        self.sources, self.moving, self.find, self.text = sources, moving, find, text
        self.close, self.as_json = close, as_json

    def run(self) -> None:
        """Exits where VMs stay."""
        self._check_options()
        if self.moving.apply:
            self._apply()
            return
        writes = self.close is not None and self._has_ledger and not self.moving.dry_run
        with recording(self.sources) if writes else nullcontext() as ledger:
            pool = read_the_pool(self.sources, ledger)
            note_failures(pool)
            with planner_of(pool, self.sources) as planner:
                plan = self.find(pool, planner, {})
            if ledger is not None and self.close is not None:
                self.close(ledger)
        self._print(plan, pool)
        self._exit(plan, pool)

    @property
    def _has_ledger(self) -> bool:
        return folder_of(self.sources) is not None

    def _check_options(self) -> None:
        moving = self.moving
        if not moving.apply:
            given = {"--yes": moving.yes, "--connect": moving.uris, "--destroy": moving.destroy}
            for option, value in given.items():
                if value:
                    raise UsageError(f"{option}: expected --apply as well, found none")
            return
        if self.as_json and not (moving.yes or moving.dry_run):
            raise UsageError("--json: expected --yes or --dry-run as well: it asks nothing")
        check_can_ask(asked=not (moving.yes or moving.dry_run))

    def _apply(self) -> None:
        """Find the moves, show them, ask, reserve for all of them, and carry them out."""
        from homenode.change.vm_move import PowerOff, VmMove
        from homenode.cluster.pool.moving import PoolDaemons, give_up, move_all

        pool = read_the_pool(self.sources)
        note_failures(pool)
        with planner_of(pool, self.sources) as planner:
            daemons = PoolDaemons(pool, self._uris(pool))
            found = daemons.plan(lambda staying: self.find(pool, planner, staying), planner)
        self._print(found.plan, pool)
        if self.moving.dry_run or not found.moves:
            self._exit(found.plan, pool)
            return
        vms = plural(len(found.moves), "VM")
        if not self.moving.yes and not confirm(f"Stop {vms} and start each on its new host?"):
            note("nothing was changed")
            raise SystemExit(FINDINGS)
        power_off = PowerOff(timeout_s=self.moving.timeout_s, ends=self.moving.destroy)
        begun: list[VmMove] = []
        try:
            with recording(self.sources) if self._has_ledger else nullcontext() as ledger:
                if ledger is not None and read_the_pool(self.sources, ledger) != pool:
                    raise UsageError(
                        "expected the pool as it was read, found it changed meanwhile",
                        hint="run it again",
                    )
                daemons.begin(found.moves, ledger, power_off, begun.append)
                if ledger is not None and self.close is not None:
                    self.close(ledger)
        except BaseException:
            give_up(begun)
            raise
        moves = {one.vm.uuid: one.move for one in found.moves}

        def on_moved(one: VmMove) -> None:
            move = moves[one.uuid]
            note(f"{one.name}: runs on {move.to_host}")
            if self._has_ledger:
                with recording(self.sources) as ledger:
                    ledger.note_moved(one.name, one.uuid, move.from_host)

        move_all(begun, on_moved)
        note("next: capture the pool again, which shows the VMs on their new hosts")
        self._exit(found.plan, pool)

    def _uris(self, pool: Pool) -> dict[str, str]:
        """Raises UsageError."""
        given = [one.partition("=") for one in self.moving.uris]
        for host, equals, uri in given:
            if not equals:
                raise UsageError(f"--connect: expected HOST=URI, found {host + uri!r}")
        check_hosts([host for host, _, _ in given], pool, option="--connect")
        return {host: uri for host, _, uri in given}

    def _print(self, plan: MovePlan, pool: Pool) -> None:
        if self.as_json:
            print_json(encode("pool-moves", plan))
        else:
            applies = self.moving.apply
            use = MovesFor(sources=self.sources, reserves=self._has_ledger, applies=applies)
            console().print(self.text(plan, pool, use))

    def _exit(self, plan: MovePlan, pool: Pool) -> None:
        if plan.stuck:
            raise SystemExit(UNPLANNABLE)
        exit_with_failures(pool)
