"""homenode plan: where a VM goes on a host, why, and its tuned document. [I/O]"""

from pathlib import Path
from typing import Annotated

import typer

from homenode.cli.completion import host_sources
from homenode.cli.options import ForceOption, JsonOption, LspciOption, OutputOption, with_records
from homenode.cli.placing_options import (
    LayoutOptions,
    ManualOptions,
    PlacementOptions,
    SwitchOptions,
    VmOptions,
    plan_options,
)
from homenode.errors import UsageError
from homenode.targets.hypervisors import NAMES


@with_records
def plan(
    layout: LayoutOptions,
    vm: VmOptions,
    placement: PlacementOptions,
    switches: SwitchOptions,
    manual: ManualOptions,
    document: Annotated[
        str | None,
        typer.Argument(
            metavar="[VM]",
            help="The VM: a domain document, a configuration of qm, xl or Incus, a command of "
            "Cloud Hypervisor, a flavor, a template of OpenNebula; - for standard input. Without "
            "it --vcpus, --memory and --gpus say what the new VM is.",
        ),
    ] = None,
    vm_file: Annotated[
        str | None, typer.Option("--vm", metavar="FILE", help="The same as [VM].")
    ] = None,
    target: Annotated[
        str | None,
        typer.Option(
            "--target",
            metavar="NAME",
            help=f"Write for libvirt, {', '.join(NAMES)}, or a target that an installed Python "
            "distribution adds. Default: the format of the VM's file, else libvirt.",
        ),
    ] = None,
    host: Annotated[
        list[str] | None,
        typer.Option(
            "--host",
            metavar="SOURCE",
            help="The host: a capture, a /sys tree, an hwloc XML, a host.toml, or a shipped host's "
            "name (homenode hosts). Default: this machine. Given several times, the hosts are "
            "ranked.",
            autocompletion=host_sources,
        ),
    ] = None,
    lspci: LspciOption = None,
    libvirt: Annotated[
        str | None,
        typer.Option(
            "--libvirt",
            metavar="VERSION",
            help="libvirt of the host, such as 12.1, instead of what was found there.",
        ),
    ] = None,
    qemu: Annotated[
        str | None,
        typer.Option("--qemu", metavar="VERSION", help="QEMU of the host, such as 8.2."),
    ] = None,
    output: OutputOption = None,
    name: Annotated[
        str | None,
        typer.Option(
            "--name",
            metavar="NAME",
            help="Name of a new VM, or of a copy of VM, with its own UUID, NVRAM and MACs.",
        ),
    ] = None,
    diff: Annotated[bool, typer.Option("--diff", help="Print the change as a diff.")] = False,
    save_plan: Annotated[
        Path | None,
        typer.Option("--save-plan", metavar="PLAN.json", help="Write the plan here."),
    ] = None,
    svg: Annotated[
        Path | None, typer.Option("--svg", metavar="FILE", help="Draw host and plan here.")
    ] = None,
    explain: Annotated[
        bool,
        typer.Option("--explain", help="Print every figure that was compared, and all runners-up."),
    ] = False,
    quiet: Annotated[
        bool, typer.Option("--quiet", "-q", help="Do not print the explanation.")
    ] = False,
    force: ForceOption = False,
    json: JsonOption = False,
) -> None:
    """Plan where a VM goes on a host, explain it, and write the tuned domain document.

    Nothing on any machine changes: the tuned document is a file. `homenode restore FILE` gives the
    original back, and `homenode apply NAME` plans and defines a domain of libvirt.

    Examples:
      homenode plan VM.xml --host hgx-h100 --gpus 8 --diff
      homenode plan --gpus 2 --vcpus 16 --memory 64GiB -o vm.xml
    """
    from homenode.cli import planning

    if document is not None and vm_file is not None:
        raise UsageError("give either --vm or a VM file, not both")

    options = plan_options(layout, vm, placement, switches)
    planning.run(
        document or vm_file,
        options,
        planning.Sources(
            tuple(host or ()),
            lspci,
            placement.after,
            manual.ranges(),
            layout.results,
            planning.version_of("--libvirt", libvirt),
            planning.version_of("--qemu", qemu),
        ),
        planning.Outputs(output, name, diff, save_plan, svg, quiet, json, force, target, explain),
    )
