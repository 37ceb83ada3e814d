"""Clients of one pool's ledger, each a process that writes down what it was told, to be killed at
any moment; and the judge, which knows nothing of the ledger but its answers.

As a program: python -m tests.pool.ledger_clients client|capture FOLDER SEED OPERATIONS
"""

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from msgspec.structs import replace

from homenode.cluster.pool.flavour import Flavour
from homenode.cluster.pool.ledger import Ledger
from homenode.cluster.pool.model import Pool
from homenode.cluster.pool.place import PoolPlaces, placed_vm
from homenode.cluster.pool.planner import Planner
from homenode.cluster.pool.reservations import Reservation
from homenode.cluster.pool.sources import load_pool
from homenode.cluster.pool.stored import POOL_FILE, encode_pool
from homenode.durable import replace_file
from homenode.machine.topology import RunningDomain
from homenode.units import GIB
from tests.pool.pools import pool_of, shipped, sized

SIZES = tuple(
    sized(name=f"gpu{gpus}", gpus=gpus, vcpus=2, memory_bytes=4 * GIB) for gpus in (0, 1, 2)
)


class Log:
    """What one process was told, line by line, in a file of its own."""

    def __init__(self, folder: Path, name: str) -> None:
        path = folder.parent / f"{name}.log"
        self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)

    def write(self, *words: object) -> None:
        os.write(self._descriptor, (json.dumps(words) + "\n").encode())


def begin(folder: Path, hosts: int) -> None:
    folder.mkdir()
    write_pool(folder, pool_of([(f"h{i}", shipped("small-2n8c-2gpu")) for i in range(hosts)]))


def write_pool(folder: Path, pool: Pool) -> None:
    replace_file(folder / POOL_FILE, "".join(encode_pool(pool)).encode(), synced=False)


def _mine(folder: Path, seed: int) -> tuple[list[tuple[str, str]], int]:
    """The VMs of this client that are there, or may be, since it was killed; and how many lines it
    has written."""
    names: dict[str, str] = {}
    written = 0
    for what, uuid, *more in lines(folder, "client", f"{seed}"):
        written += 1
        if what == "place":
            names[uuid] = more[0]
        elif what == "removed" or (what == "placed" and not more[0]):
            del names[uuid]
    return [(name, uuid) for uuid, name in names.items()], written


def uuid_of(seed: int, number: int) -> str:
    return f"00000000-0000-4000-a000-{seed:04d}{number:08d}"


def client(folder: Path, seed: int, operations: int) -> None:
    """Places and removes VMs of its own, as pool place --record and pool remove do."""
    rng, log = random.Random(seed * 1009 + operations), Log(folder, f"client-{seed}")
    mine, first = _mine(folder, seed)
    for number in range(first, first + operations):
        if mine and rng.random() < 0.4:
            name, uuid = mine.pop(rng.randrange(len(mine)))
            log.write("remove", uuid)
            with Ledger(folder) as ledger, ledger.writing():
                known = ledger.find(name, uuid)
                if known is not None:
                    ledger.release(known)
            log.write("removed", uuid)
            continue
        # All clients use the same few names: the UUID is what tells the VMs apart.
        name, uuid = f"vm{rng.randrange(30)}", uuid_of(seed, number)
        log.write("place", uuid, name)
        found = _placed(folder, name, uuid, rng.choice(SIZES))
        log.write("placed", uuid, found is not None)
        if found is not None:
            mine.append((name, uuid))


def _placed(folder: Path, name: str, uuid: str, flavour: Flavour) -> str | None:
    with Ledger(folder) as ledger, ledger.writing():
        pool = ledger.update(load_pool([str(folder)], reserved=False))
        places = PoolPlaces(pool, (), Planner(pool))
        identity = Reservation(host="", vm=_named(name, uuid)).identity
        best = next(places.ranked(flavour, vm=identity), None)
        if best is None:
            return None
        vm = replace(placed_vm(places, best.host.name, flavour, name), uuid=uuid)
        ledger.reserve(Reservation(host=best.host.name, vm=vm))
        return best.host.name


def _named(name: str, uuid: str) -> RunningDomain:
    return RunningDomain(name, False, (), None, (), 0, False, (), None, (), uuid=uuid)


def capture(folder: Path, seed: int, operations: int) -> None:
    """Starts VMs where they are reserved, ends others, and captures the hosts after each."""
    rng, log = random.Random(seed), Log(folder, f"capture-{seed}")
    for _ in range(operations):
        with Ledger(folder) as ledger, ledger.writing():
            pool = load_pool([str(folder)], reserved=False)
            planned = [one for one in ledger.reservations() if one.is_counted]
            running = [(host.name, vm) for host in pool.hosts for vm in host.domains]
            domains = {host.name: list(host.domains) for host in pool.hosts}
            if running and rng.random() < 0.5:
                host, vm = rng.choice(running)
                domains[host].remove(vm)
                log.write("ended", vm.uuid)
            elif planned:
                one = rng.choice(planned)
                vm = replace(one.vm, running=True, planned=False)
                domains[one.host].append(vm)
                log.write("started", vm.uuid, one.host)
            hosts = tuple(replace(one, domains=tuple(domains[one.name])) for one in pool.hosts)
            write_pool(folder, replace(pool, hosts=hosts))
            ledger.forget_gone()
            ledger.update(replace(pool, hosts=hosts))
        time.sleep(0.002)


def lines(folder: Path, which: str, seed: str = "*") -> Iterator[tuple[str, ...]]:
    for path in sorted(folder.parent.glob(f"{which}-{seed}.log")):
        for line in path.read_text().splitlines():
            yield tuple(json.loads(line))


def check(folder: Path) -> dict[str, int]:
    """Compare the ledger and the capture with what the processes were told."""
    pool = load_pool([str(folder)])
    here: dict[str, str] = {}
    for host in pool.hosts:
        devices: dict[object, str] = {}
        pus: dict[object, str] = {}
        for vm in host.domains:
            assert vm.uuid is not None
            assert vm.uuid not in here, ("twice", vm.uuid)
            here[vm.uuid] = host.name
            for device in vm.devices:
                assert devices.setdefault(device, vm.uuid) == vm.uuid, ("twice", device)
            for pu in (pu for pin in vm.vcpu_pins for pu in pin or ()):
                assert pus.setdefault(pu, vm.uuid) == vm.uuid, ("twice", pu)
    ended = {uuid for what, uuid, *_ in lines(folder, "capture") if what == "ended"}
    told: dict[str, str] = {}
    for what, uuid, *found in lines(folder, "client"):
        told[uuid] = what if what != "placed" or found[0] else "refused"
    captured = load_pool([str(folder)], reserved=False)
    shown = {vm.uuid for host in captured.hosts for vm in host.domains}
    counts = {"placed": 0, "gone": 0}
    for uuid, what in told.items():
        if what == "placed":
            lost = uuid not in here and uuid not in ended
            assert not lost, ("lost", uuid)
            counts["gone" if uuid not in here else "placed"] += 1
        elif what in ("removed", "refused"):
            assert uuid not in here or uuid in shown, ("ghost", uuid)
    for uuid in here:
        assert uuid in told, ("ghost", uuid)
    return counts


def start(kind: str, folder: Path, seed: int, operations: int) -> "subprocess.Popen[bytes]":
    program = (sys.executable, "-m", "tests.pool.ledger_clients", kind, str(folder))
    return subprocess.Popen((*program, str(seed), str(operations)), start_new_session=True)


def storm(folder: Path, *, clients: int, operations: int, rounds: int, seed: int = 1) -> int:
    """So many rounds of all at once, in each of which some are killed; the number of operations."""
    rng = random.Random(seed)
    for number in range(rounds):
        asked = [start("client", folder, 1 + i, operations + number) for i in range(clients)]
        asked += [start("capture", folder, 95, operations + number)]
        time.sleep(0.3 + rng.random() * 1.5)
        for victim in rng.sample(asked, 3):
            os.killpg(victim.pid, signal.SIGKILL)
        for one in asked:
            code = one.wait()
            assert code in (0, -signal.SIGKILL), (one.args, code)
        check(folder)
    return sum(1 for what, *_ in lines(folder, "client") if what in ("placed", "removed"))


if __name__ == "__main__":
    _, kind, folder, seed, operations = sys.argv
    {"client": client, "capture": capture}[kind](Path(folder), int(seed), int(operations))
