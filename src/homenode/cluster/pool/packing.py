"""Packing as files and text: a plan for each VM, and the sums. [I/O]"""

import re
from collections.abc import Iterable, Mapping
from pathlib import Path

from msgspec import Struct

from homenode.cluster.pool.model import Pool
from homenode.cluster.pool.pack import PackedVm, Packing
from homenode.durable import replace_file
from homenode.errors import HostError, InputError
from homenode.formats import decode, encode
from homenode.input_files import read_file
from homenode.machine.pci import canonical_uuid
from homenode.plan.stored import encode_plan
from homenode.plan.tuning import Tuning, tune_as_planned
from homenode.vm.domain.copy import copied_uuid
from homenode.vm.domain.read import read_vm
from homenode.vm.domain.restore import write_tuned
from homenode.wording import plural

_FILE = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.+-]{0,200}", re.ASCII)


class PackedLine(Struct, frozen=True, kw_only=True):
    """Where a VM goes."""

    vm: str
    host: str
    rung: str


class UnplacedLine(Struct, frozen=True):
    """A VM that stays out, and why."""

    vm: str
    reason: str


class PackingSummary(Struct, frozen=True, kw_only=True):
    """A packing without its plans. gap: 1 - value / bound."""

    value: int
    bound: float | None
    gap: float | None
    packages_crossed: int
    gpus_away: int
    hosts: int
    vms: tuple[PackedLine, ...]
    unplaced: tuple[UnplacedLine, ...]


def encode_packing(packing: Packing) -> str:
    """The homenode.pool-packing document."""
    return encode(
        "pool-packing",
        PackingSummary(
            value=packing.value,
            bound=packing.bound,
            gap=packing.gap,
            packages_crossed=packing.packages_crossed,
            gpus_away=packing.gpus_away,
            hosts=packing.hosts,
            vms=tuple(
                PackedLine(vm=vm.name, host=vm.host, rung=vm.plan.fallback) for vm in packing.vms
            ),
            unplaced=tuple(UnplacedLine(*one) for one in packing.unplaced),
        ),
    )


def read_packing(folder: Path) -> tuple[str, ...]:
    """The names of the VMs that the packing of a folder placed. Raises InputError, HostError."""
    path = folder / "packing.json"
    hint = "the folder that homenode pool pack wrote (-o)"
    content = read_file(path, "a packing", hint=hint)
    return tuple(vm.vm for vm in decode(content, "pool-packing", PackingSummary, str(path)).vms)


def check_file_names(names: Iterable[str]) -> None:
    """Raises InputError for a VM whose name cannot be a file's."""
    for name in names:
        if not _FILE.fullmatch(name) or name == "packing":
            raise InputError(f"VM {name!r}: expected a name that can be a file's")


def uuid_of(vm: PackedVm) -> str | None:
    """The UUID of a packed VM, as its tuned document has it; None where libvirt will choose."""
    if vm.document is None:
        return None
    guest = read_vm(vm.document.content, vm.document.source)
    uuid = None if guest.uuid is None else canonical_uuid(guest.uuid)
    return uuid if uuid is None or guest.name == vm.name else copied_uuid(uuid, vm.name)


def tuned_documents(packing: Packing, pool: Pool) -> dict[str, Tuning]:
    """The tuned document of each VM that has one, by name. Raises what tuning raises."""
    host_of = {host.name: host for host in pool.hosts}
    found = {}
    for vm in packing.vms:
        if vm.document is not None:
            source, content = vm.document.source, vm.document.content
            copy = None if read_vm(content, source).name == vm.name else vm.name
            host = pool.host(host_of[vm.host])
            found[vm.name] = tune_as_planned(content, source, vm.plan, host, copy_name=copy)
    return found


def write_packing(folder: Path, packing: Packing, tuned: Mapping[str, Tuning]) -> None:
    """NAME.json for each VM, NAME.xml where it has a document, and packing.json. Raises InputError
    as check_file_names does, HostError where the folder cannot be written."""
    check_file_names(vm.name for vm in packing.vms)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for vm in packing.vms:
            replace_file(folder / f"{vm.name}.json", encode_plan(vm.plan).encode(), synced=False)
        for name, tuning in tuned.items():
            write_tuned(folder / f"{name}.xml", tuning.original, tuning.document)
        replace_file(folder / "packing.json", encode_packing(packing).encode(), synced=False)
    except OSError as error:
        raise HostError(f"{folder}: expected to write there, found: {error.strerror}") from None


def packing_text(packing: Packing) -> str:
    """The sums, the VMs of each host, and the VMs that were left out."""
    lines = [
        f"placed {len(packing.vms)} of {len(packing.vms) + len(packing.unplaced)} VMs on "
        f"{plural(packing.hosts, 'host')}: value {packing.value}{_bound(packing)}",
        f"packages crossed: {packing.packages_crossed}; GPUs away from their node: "
        f"{packing.gpus_away}",
    ]
    by_host: dict[str, list[str]] = {}
    for vm in packing.vms:
        by_host.setdefault(vm.host, []).append(vm.name)
    lines += [f"  {host}: {', '.join(names)}" for host, names in by_host.items()]
    by_reason: dict[str, list[str]] = {}
    for name, reason in packing.unplaced:
        by_reason.setdefault(reason, []).append(name)
    for reason, names in by_reason.items():
        more = f" and {len(names) - 20} more" if len(names) > 20 else ""
        lines.append(f"not placed: {', '.join(names[:20])}{more}: {reason}")
    return "\n".join(lines)


def _bound(packing: Packing) -> str:
    if packing.bound is None or packing.gap is None:
        return "; bound unknown: the solver found nothing in its time (--time-limit)"
    return f" of at most {packing.bound:.0f} (gap {packing.gap * 100:.1f} %)"
