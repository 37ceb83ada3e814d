"""Moving: moves of a pool carried out through libvirt on both hosts. [I/O]"""

from collections.abc import Callable, Iterator, Mapping, Sequence

from msgspec import Struct

from homenode.change.journal import default_root
from homenode.change.step import ChangeEntry
from homenode.change.vm_move import PowerOff, VmMove, carry_out, planned_move
from homenode.cluster.pool.ledger import Ledger, ReserveStep
from homenode.cluster.pool.model import Pool, PoolHost, VmIdentity
from homenode.cluster.pool.moves import Move, MovePlan, StuckVm, TunedMove, tuned_moves
from homenode.cluster.pool.planner import Planner
from homenode.cluster.pool.reservations import Reservation, seen_in
from homenode.errors import InputError
from homenode.machine.topology import RunningDomain
from homenode.vm.domain.document import Document
from homenode.vm.domain.read import nvram_file, open_domain, read_running_domain
from homenode.vm.domain.schema import refuse_new_errors
from homenode.vm.hypervisor.virsh import Virsh


class MovablePlan(Struct, frozen=True, kw_only=True):
    """Moves of which every VM can move, each with what it gets."""

    plan: MovePlan
    moves: tuple[TunedMove, ...]


class PoolDaemons:
    """libvirt on the hosts of a pool. uris: by host, where the pool's own is another."""

    def __init__(self, pool: Pool, uris: Mapping[str, str]) -> None:
        self._pool = pool
        self._hosts = {host.name: host for host in pool.hosts}
        self._virsh = {
            name: Virsh(uris.get(name, host.libvirt_uri)) for name, host in self._hosts.items()
        }
        self._names: dict[str, dict[str, str]] = {}

    def of(self, host: str) -> Virsh:
        return self._virsh[host]

    def plan(
        self, find: Callable[[Mapping[tuple[str, str], str]], MovePlan], planner: Planner
    ) -> MovablePlan:
        """The moves, found again until every VM of them can move. Raises InputError where a host
        does not have what its capture shows."""
        staying: dict[tuple[str, str], str] = {}
        while True:
            plan = find(staying)
            found = tuple(self._checked(plan, planner))
            stuck = [one for one in found if isinstance(one, StuckVm)]
            if not stuck:
                return MovablePlan(
                    plan=plan, moves=tuple(one for one in found if isinstance(one, TunedMove))
                )
            staying |= {(one.host, one.vm): one.reason for one in stuck}

    def _checked(self, plan: MovePlan, planner: Planner) -> Iterator[TunedMove | StuckVm]:
        """Those that stay; where there are none, all moves with their plans."""
        stuck, seen = [], set[str]()
        for host in dict.fromkeys(
            name for move in plan.moves for name in (move.from_host, move.to_host)
        ):
            self._check_capture(self._hosts[host])
        for move in plan.moves:
            reason = self._unmovable(move, planner, has_moved=move.vm in seen)
            seen.add(move.vm)
            if reason is not None:
                stuck.append(StuckVm(vm=move.vm, host=move.from_host, reason=reason))
        if stuck:
            yield from stuck
            return
        yield from tuned_moves(self._pool, plan.moves, planner, self._document)

    def _document(self, move: Move) -> bytes:
        return self.of(move.from_host).definition(self._uuid(move))

    def _uuid(self, move: Move) -> str:
        return _vm_of(self._hosts[move.from_host], move.vm).uuid or ""

    def _unmovable(self, move: Move, planner: Planner, *, has_moved: bool) -> str | None:
        """Why a VM cannot be stopped here and started there."""
        if has_moved:
            return "it moves once: capture the pool and run this again"
        host = self._hosts[move.from_host]
        vm, here, there = _vm_of(host, move.vm), self.of(move.from_host), self.of(move.to_host)
        if vm.planned or vm.uuid is None:
            return "it is not started there yet" if vm.planned else "its capture has no UUID"
        others = set(vm.devices) - planner.gpus(host.shape)
        if others:
            return f"its device {min(others)} is no GPU: plan it by hand"
        state = here.find(vm.uuid)
        if state is None or not state.persistent:
            return "it is transient: it has no definition"
        if state.managed_save or here.snapshots(vm.uuid) or here.checkpoints(vm.uuid):
            return "it has snapshots, checkpoints or saved memory on this host: remove them first"
        if here.has_job(vm.uuid):
            return "it migrates or is backed up now: wait for that"
        if move.to_host not in self._names:
            self._names[move.to_host] = there.domains()
        for uuid, name in self._names[move.to_host].items():
            if uuid == vm.uuid or name == state.name:
                return f"{move.to_host} has a domain of its name or UUID"
        return next(_kept_here(open_domain(here.definition(vm.uuid), vm.name)), None)

    def _check_capture(self, host: PoolHost) -> None:
        """Raises InputError where other VMs run there, or with other PUs, memory or devices."""
        virsh = self.of(host.name)
        now = {
            uuid: read_running_domain(virsh.live_document(uuid), running=True)
            for uuid in virsh.domains(running=True)
        }
        before = {vm.uuid: vm for vm in host.domains if vm.running}
        wrong = {vm.name for uuid, vm in now.items() if _taken(vm) != _taken(before.get(uuid))}
        wrong |= {vm.name for uuid, vm in before.items() if uuid not in now}
        if wrong:
            raise InputError(
                f"{host.name}: expected what its capture shows of {', '.join(sorted(wrong)[:8])}, "
                f"found other VMs, PUs, memory or devices at {virsh.connect}",
                hint="capture the pool again: homenode pool capture ... --again",
            )

    def begin(
        self,
        moves: Sequence[TunedMove],
        ledger: Ledger | None,
        power_off: PowerOff,
        on_begun: Callable[[VmMove], None],
    ) -> None:
        """Save the documents of each, and reserve where it goes. ledger: locked, so that all is
        reserved or nothing; None = the pool has none."""
        root, moved = default_root(), frozenset(self._uuid(one.move) for one in moves)
        for one in moves:
            refuse_new_errors(one.original, one.tuning.document, one.tuning.libvirt)
            here, there = self.of(one.move.from_host), self.of(one.move.to_host)
            documents = (one.original, one.tuning.document)
            there_now = self._hosts[one.move.to_host].domains
            known = moved.union(vm.uuid or "" for vm in there_now if vm.running)
            own = planned_move(root, here, there, self._uuid(one.move), documents, power_off, known)
            on_begun(own)
            if ledger is None:
                continue
            earlier = ledger.find(one.vm.name, one.vm.uuid)
            reserved = Reservation(
                host=one.move.to_host,
                vm=one.vm,
                owner="" if earlier is None else earlier.owner,
                rules=one.rules,
                seen=seen_in(self._pool, VmIdentity.of(one.vm)),
            )
            ReserveStep(ledger=ledger, one=reserved).do(own.journal.write)


def _vm_of(host: PoolHost, name: str) -> RunningDomain:
    return next(vm for vm in host.domains if vm.name == name)


def _taken(vm: RunningDomain | None) -> object:
    """What a VM has of its host."""
    if vm is None:
        return None
    return (
        vm.vcpu_pins,
        vm.emulator_pus,
        vm.memory_bytes,
        vm.memory_by_node,
        vm.devices,
        vm.mediated,
    )


def _kept_here(document: Document) -> Iterator[str]:
    """What of a VM lies on its host alone, or is another thing on the next."""
    root = document.root
    has_file = (nvram_file(document) or "").startswith("/")
    if root.at("os/varstore") is not None or (root.at("os/nvram") is not None and not has_file):
        yield "its UEFI variables are not a regular file: move it by hand"
    for tpm in root.all("devices/tpm"):
        backend = tpm.child("backend")
        if backend is not None and backend.get("type") == "emulator":
            yield "the state of its TPM is a file of this host: move it by hand"
    for device in root.all("devices/hostdev"):
        if device.get("type") not in ("pci", "mdev"):
            yield f"it has a {device.get('type')} device of this host"
    if any(one.get("type") == "hostdev" for one in root.all("devices/interface")):
        yield "it has a network device of this host: plan it by hand"


def move_all(moves: Sequence[VmMove], on_moved: Callable[[VmMove], None]) -> None:
    """Carry them out, each whole or undone, up to the first that fails: those after it are not
    begun, and what was reserved for them is free. Raises what went wrong."""
    left = list(moves)
    try:
        while left:
            carry_out(left.pop(0), reservation_step)
            on_moved(moves[-len(left) - 1])
    except BaseException:
        give_up(left)
        raise


def give_up(moves: Sequence[VmMove]) -> None:
    """Undo what `begin` has reserved."""
    for move in moves:
        move.journal.undo(reservation_step)


def reservation_step(entry: ChangeEntry) -> ReserveStep:
    """The step of a move that is its reservation."""
    return ReserveStep()
