"""Obstacles: what stands against changing a domain's definition, each by name."""

from collections.abc import Mapping

from homenode.errors import HomenodeError
from homenode.findings import Rejection
from homenode.text import command_line, operands
from homenode.vm.domain.document import parse_document
from homenode.vm.domain.read import open_domain, vm_of
from homenode.vm.hypervisor.connection import with_connection
from homenode.vm.hypervisor.domain_state import DomainState
from homenode.vm.model import Vm


def obstacles(
    state: DomainState,
    definition: bytes,
    snapshots: Mapping[str, bytes],
    *,
    connect: str,
    restoring: bool = False,
) -> tuple[Rejection, ...]:
    """The reasons why the definition of a domain cannot be replaced now.

    snapshots: name -> document, as `virsh snapshot-dumpxml` prints it. restoring: omit the hints
    that are for an apply. Raises ParseError or InputError if `definition` cannot be read.
    """
    name, virsh = state.name, command_line("virsh", "-c", connect)
    live_pins = command_line(
        *with_connection(connect, "homenode", "apply", state.argument, "--live-pins")
    )
    rejections = []
    if not state.persistent:
        rejections.append(
            Rejection(
                "transient",
                (),
                f"{name}: expected a domain with a definition, found a transient one",
                f"{virsh} dumpxml {state.uuid} > VM.xml, then define it from there",
            )
        )
    if state.is_active:
        rejections.append(
            Rejection(
                "running",
                (),
                f"{name}: expected it shut off, found it {state.state}",
                "shut it down first"
                + ("" if restoring else f", or move its threads alone: {live_pins}"),
            )
        )
    if state.managed_save:
        rejections.append(
            Rejection(
                "managed-save",
                (),
                f"{name}: expected no saved memory, found a managed save: the next start would "
                "resume it with the topology that it was saved with",
                f"start it and shut it down from inside, or drop the saved memory: {virsh} "
                f"managedsave-remove {state.uuid}",
            )
        )
    if snapshots:
        guest = vm_of(open_domain(definition, "the document to define"))
        for snapshot, document in snapshots.items():
            owned = _held_topology(document, snapshot)
            if owned is None or owned != _topology(guest):
                words = ("snapshot-delete", state.uuid, *operands(snapshot))
                rejections.append(
                    Rejection(
                        "snapshot",
                        (),
                        f"{name}: expected no snapshot of another topology, found {snapshot!r}: "
                        "reverting to it would bring the old definition back",
                        f"{virsh} {command_line(*words)}"
                        + ("" if restoring else ", or tune a copy: homenode plan --name COPY"),
                    )
                )
    return tuple(rejections)


def _topology(guest: Vm) -> tuple[object, ...]:
    return (
        guest.vcpus,
        guest.cpu_topology,
        guest.cell_vcpus,
        guest.memory_bytes,
        guest.controllers,
        tuple((device.bdf, device.address) for device in guest.hostdevs),
    )


def _held_topology(document: bytes, source: str) -> tuple[object, ...] | None:
    """The topology of the domain in a snapshot; None where it cannot be read."""
    try:
        snapshot = parse_document(document, source)
        inside = snapshot.root.child("inactiveDomain") or snapshot.root.child("domain")
        if inside is None:
            return None
        # <inactiveDomain> is a <domain> under another name.
        text = snapshot.text[inside.start : inside.end].replace(b"inactiveDomain", b"domain")
        return _topology(vm_of(open_domain(text, source)))
    except HomenodeError:
        return None  # then it is in the way
