"""What `homenode plan` does with its arguments: for libvirt, or for another target. [I/O]"""

from homenode.cli import plan_target, planning
from homenode.cli.arguments.place import PlanArguments
from homenode.errors import UsageError
from homenode.vm.plan_options import refuse_objective


def plan(asked: PlanArguments) -> None:
    """Plan, write and print as it is asked."""
    if asked.document is not None and asked.vm_file is not None:
        raise UsageError("give either --vm or a VM file, not both")
    refuse_objective(asked.options)
    original, source = planning.read_original(asked)
    if plan_target.is_for_libvirt(original, source, asked.target):
        planning.tune_and_write(original, source, asked)
    else:
        plan_target.run(original, source, asked)
