"""homenode replan: a new plan for a domain whose plan no longer fits its host. [I/O]"""

from typing import TYPE_CHECKING

from homenode.cli.apply import changing_host, define, preview, tuned_on
from homenode.cli.arguments.place import ReplanArguments
from homenode.cli.terminal import check_can_ask, note
from homenode.errors import HostError, UsageError
from homenode.vm.hypervisor.connection import is_local, with_connection

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from homenode.bdf import Bdf
    from homenode.machine.topology import Host
    from homenode.vm.model import GuestHostdev


def replan(asked: ReplanArguments) -> None:
    """Plan again, show the difference, ask, and define it."""
    from homenode.change.apply.define_step import DomainChange
    from homenode.change.journal import default_root
    from homenode.vm.domain.hostdevs import replace_sources
    from homenode.vm.domain.metadata import read_record
    from homenode.vm.domain.read import open_domain, vm_of
    from homenode.vm.fingerprint import is_made_for
    from homenode.vm.hypervisor.virsh import Virsh
    from homenode.vm.layout import PRESETS
    from homenode.vm.plan_options import PlanOptions
    from homenode.vm.sources import load_host
    from homenode.wording import command_line

    check_can_ask(asked=not (asked.yes or asked.dry_run))
    if asked.host is None and not is_local(asked.connect):
        raise UsageError(
            f"--connect {asked.connect}: expected --host as well, since the daemon is on another "
            "machine",
            hint="homenode capture --ssh HOST -o host.tar.gz, then --host host.tar.gz",
        )
    with changing_host("replan", (asked.name,), asked.connect, dry_run=asked.dry_run):
        virsh = Virsh(asked.connect)
        state = virsh.domain(asked.name)
        original = virsh.definition(state.uuid)
        document = open_domain(original, state.name)
        record = read_record(document)
        if record is None:
            raise UsageError(
                f"{state.name}: expected a domain with a layout of homenode, found none",
                hint=command_line(
                    *with_connection(asked.connect, "homenode", "apply", state.argument)
                ),
            )
        machine = load_host(asked.host)
        document = replace_sources(document, _replaced(asked.device))
        _refuse_missing(vm_of(document).hostdevs, machine, state.name)
        is_same = record.host is not None and is_made_for(machine, record.host)
        if not is_same and machine.nodes_assumed:
            raise HostError(
                f"{machine.name}: expected its NUMA nodes, found none in what can be read of it",
                hint="run it on the host itself, not in a container, or give a capture: --host",
            )
        note(
            f"{state.name}: layout {record.layout.name}, planned for "
            f"{'this host as it is' if is_same else 'another host, or this one before it changed'}"
        )
        layout = record.layout
        options = PlanOptions(
            layout.name if layout.name in PRESETS else "default",
            pinning=layout.pinning,
            siblings=layout.siblings,
            cells=layout.cells,
            pcie=layout.pcie,
            memory_binding=layout.memory,
            objective=record.objective,
        )
        tuning = tuned_on(state.name, document.to_bytes(), options, asked.host, (), [], quiet=False)
        change = DomainChange(name=state.uuid, tuned=tuning.document, original=original)
        if asked.dry_run:
            preview(virsh, (change,), default_root())
        else:
            define(virsh, (change,), default_root(), asked=not asked.yes)


def _replaced(words: "Sequence[str]") -> "Mapping[Bdf, Bdf]":
    from homenode.bdf import Bdf

    found: dict[Bdf, Bdf] = {}
    for word in words:
        old, equals, new = word.partition("=")
        if not equals:
            raise UsageError(f"--device: expected OLD=NEW such as 19:00.0=3b:00.0, found {word!r}")
        found[Bdf.parse(old, "--device")] = Bdf.parse(new, "--device")
    return found


def _refuse_missing(hostdevs: "tuple[GuestHostdev, ...]", host: "Host", name: str) -> None:
    """Raises UsageError for devices that the host does not have: which one replaces them is the
    operator's to say."""
    there = {one.bdf: one for one in host.pci_devices}
    if not there:
        return
    missing = [str(one.bdf) for one in hostdevs if one.bdf not in there]
    if missing:
        from homenode.machine.pci import DeviceKind

        free = {one.bdf for one in hostdevs}
        gpus = [str(g.bdf) for g in host.devices_of_kind(DeviceKind.GPU) if g.bdf not in free]
        raise UsageError(
            f"{name}: expected its devices on {host.name}, found no {', '.join(missing)}",
            hint=f"--device {missing[0]}=NEW gives it another one; GPUs here: "
            f"{', '.join(gpus) or 'none'}",
        )
