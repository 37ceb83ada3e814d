"""A running libvirt domain against its plan, or against its own document. [I/O]"""

from homenode.check.verify.live.capture import Watch, capture_running_vm
from homenode.check.verify.live.checks import verify_live
from homenode.check.verify.live.memory import memory_pieces
from homenode.check.verify.live.running_vm import RunningVm
from homenode.errors import UsageError
from homenode.findings import Findings
from homenode.vm.domain.read import open_domain, vm_of
from homenode.vm.hypervisor.connection import is_local
from homenode.vm.hypervisor.virsh import Virsh
from homenode.vm.model import Vm
from homenode.vm.plan_model import Plan, vm_as_it_runs
from homenode.wording import command_line


def verify_running_domain(name: str, connect: str, plan: Plan | None = None) -> Findings:
    """Findings on a running domain of this machine. plan: made for this host; None = its document.

    Raises UsageError for a domain that does not run, a plan for another domain, or a daemon on
    another machine; HostError and InputError as Virsh does.
    """
    return verify_live(*observe_running_domain(name, connect, plan))


def observe_running_domain(
    name: str, connect: str, plan: Plan | None = None
) -> tuple[Vm, RunningVm]:
    """What is expected of a running domain, and what its host's kernel shows. Raises as above."""
    if not is_local(connect):
        raise UsageError(
            f"--live with --connect {connect}: expected a daemon on this machine, found another's",
            hint="run homenode on the VM's own host: /proc shows where its threads and pages are",
        )
    virsh = Virsh(connect)
    state = virsh.domain(name)
    if not state.is_active:
        raise UsageError(
            f"{state.name}: --live: expected a running domain, found it {state.state}",
            hint=command_line("virsh", "-c", connect, "start", state.uuid),
        )
    if plan is not None and plan.vm.name != state.name:
        raise UsageError(
            f"{state.name}: expected a plan for it, found one for {plan.vm.name}",
            hint="leave --plan out to hold it against its own document",
        )
    found = vm_of(open_domain(virsh.live_document(state.uuid), f"the document of {state.name}"))
    expected = found if plan is None else vm_as_it_runs(plan, found)
    return expected, capture_running_vm(state.uuid, what_to_watch(expected))


def what_to_watch(expected: Vm, seconds: float = 0.5) -> Watch:
    """What such a VM is looked at with."""
    return Watch(
        expected.pinned_pus,
        tuple(hostdev.bdf for hostdev in expected.hostdevs),
        tuple(piece.memory_bytes for piece in memory_pieces(expected)),
        seconds,
    )
