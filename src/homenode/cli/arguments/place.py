"""Arguments of show, plan, apply, restore, capture and nccl-topo. [I/O]"""

from pathlib import Path
from typing import Annotated

from msgspec import Struct

from homenode.cli.arguments import (
    AfterOption,
    ConnectOption,
    ForceOption,
    HostOption,
    JsonOption,
    LspciOption,
    QuietOption,
    ResultsOption,
    SavePlanOption,
)
from homenode.option import Arg, Flag, Opt, version
from homenode.vm.hypervisor.connection import DEFAULT
from homenode.vm.plan_options import ManualRanges, PlanOptions


class ShowArguments(Struct, frozen=True, kw_only=True):
    """Show a host: nodes, cores, caches, PCI tree, links, and its VMs.

    Options:
      svg: Draw the host as an SVG; print no table.
      plan: With --svg: draw the VM of this saved plan as well. The plan must be for this host.
      explain: Print the whole tree: root complexes, IOMMU groups, drivers, caches, every function.

    Examples:
      homenode show
      homenode show --host hgx-h100 --svg host.svg
    """

    host: HostOption = None
    lspci: LspciOption = None
    svg: Annotated[Path | None, Opt("--svg", "FILE")] = None
    plan: Annotated[Path | None, Opt("--plan", "PLAN.json")] = None
    explain: Annotated[bool, Flag("--explain")] = False
    force: ForceOption = False
    json: JsonOption = False


class PlanArguments(Struct, frozen=True, kw_only=True):
    """Plan a VM's placement on a host, and write its tuned definition. No machine is changed: the
    tuned definition is a file. `homenode restore FILE` restores the original, and `homenode apply
    NAME` plans and defines a domain of libvirt.

    Options:
      document: The VM: a domain XML, or a configuration of qm (Proxmox) or xl (Xen); a script that
        homenode wrote for QEMU; - reads standard input. Default: options alone.
      host: Host to plan for (sources: homenode show --help). Default: this machine.
      target: Hypervisor to write for: libvirt, proxmox, qemu, xen. A file of that target is
        edited. Default: the target of [VM]; xen if the host is `xl info -n`; else libvirt.
      output: Write the tuned definition, and the original to FILE.orig. May be VM.xml itself; - is
        standard output, as for the options of other files.
      svg: Draw the host with the VM on it.
      diff: Print the change as a unified diff.
      explain: Print costs, rejections, pins, addresses and guest changes.
      name: Name of a new VM, or of a copy of [VM] with its own UUID, NVRAM and MACs. Default: vm
        for a new VM.
      libvirt: Version of the host's libvirt, such as 12.1: elements that this version lacks are
        omitted, and a finding names the version that has them. Default: the host's.
      qemu: Version of the host's QEMU, such as 8.2: elements that this version lacks are omitted,
        and a finding names the version that has them. Default: the host's.

    Examples:
      homenode plan VM.xml --host hgx-h100 --gpus 8 --diff
      homenode plan --gpus 2 --vcpus 16 --memory 64GiB -o vm.xml
    """

    document: Annotated[str | None, Arg("[VM]", complete="vms")] = None
    host: HostOption = None
    target: Annotated[str | None, Opt("--target", "NAME", complete="targets")] = None
    output: Annotated[Path | None, Opt("--output -o", "FILE")] = None
    save_plan: SavePlanOption = None
    svg: Annotated[Path | None, Opt("--svg", "FILE")] = None
    diff: Annotated[bool, Flag("--diff")] = False
    explain: Annotated[bool, Flag("--explain")] = False
    json: JsonOption = False
    options: PlanOptions = PlanOptions()
    results: ResultsOption = ()
    name: Annotated[str | None, Opt("--name", "NAME", rare=True)] = None
    manual: ManualRanges = ManualRanges()
    after: AfterOption = ()
    lspci: LspciOption = None
    libvirt: Annotated[
        tuple[int, int, int] | None, Opt("--libvirt", "VERSION", parse=version, rare=True)
    ] = None
    qemu: Annotated[
        tuple[int, int, int] | None, Opt("--qemu", "VERSION", parse=version, rare=True)
    ] = None
    quiet: QuietOption = False
    force: ForceOption = False


class ApplyArguments(Struct, frozen=True, kw_only=True):
    """Plan a VM of libvirt, show the change, prompt, and define it.

    The original is saved first, and `homenode restore NAME` restores it. Without a terminal,
    nothing is changed unless --yes is set. The domain must be shut off, without a managed save and
    without snapshots of another topology; --live-pins moves the threads of a running domain.

    Several domains are planned together and share no CPUs or devices. All are defined or none. A VM
    that homenode has tuned keeps its layout, and is planned for the current state of the host.

    Options:
      dry_run: Print the plan, the change and each obstacle; change nothing.
      diff: Print the whole change of the definition.
      explain: Print costs, rejections, pins and addresses.
      names: Domains by name or UUID; needed.
      domain: Define this output of homenode plan instead; it must be of the same domain, for the
        host of the libvirt daemon, and with devices that this host has.
      yes: Define the VM without a prompt; needed without a terminal.
      live_pins: Move the threads of a running domain; leave its definition.
      host: The host to plan for; it must be the host of the libvirt daemon, or an equal machine.
        Default: this machine.

    Examples:
      homenode apply gpu-vm gpu-vm-2 --dry-run
      homenode apply gpu-vm --layout pin-numa --yes
    """

    names: Annotated[tuple[str, ...], Arg("NAME...", complete="vms")]
    options: PlanOptions = PlanOptions()
    host: HostOption = None
    results: ResultsOption = ()
    after: AfterOption = ()
    domain: Annotated[Path | None, Opt("--domain", "FILE", rare=True)] = None
    connect: ConnectOption = DEFAULT
    yes: Annotated[bool, Flag("--yes -y")] = False
    dry_run: Annotated[bool, Flag("--dry-run -n")] = False
    diff: Annotated[bool, Flag("--diff")] = False
    explain: Annotated[bool, Flag("--explain")] = False
    live_pins: Annotated[bool, Flag("--live-pins")] = False
    save_plan: SavePlanOption = None
    quiet: QuietOption = False
    force: ForceOption = False
    json: JsonOption = False


class RestoreArguments(Struct, frozen=True, kw_only=True):
    """Restore the original of a definition file or domain, byte for byte.

    If the tuned definition or its saved original was edited, nothing is changed. A TARGET is a file
    if it contains a slash, ends in .xml, .conf or .cfg, or has a saved original.

    Options:
      targets: A definition that homenode plan -o wrote, or domains that homenode apply defined;
        needed without --list.
      connect: The libvirt daemon of the domain; default qemu:///system.
      forget: Keep the present definition of this domain as its original.
      keep_edits: Remove only the layout from a domain that was edited after apply; keep the edits.
      dry_run: Print what would be restored; change nothing.
      diff: Print the whole change of the definition.
      explain: Print also the files of the saved original and of its record.
      list_open: List open and undoable changes on this host, each with the command that undoes it.
      yes: Restore without a prompt; needed without a terminal.

    Examples:
      homenode restore tuned.xml
      homenode restore --list
    """

    targets: Annotated[tuple[str, ...], Arg("TARGET...", complete="vms")] = ()
    connect: Annotated[str | None, Opt("--connect -c", "URI")] = None
    forget: Annotated[bool, Flag("--forget")] = False
    keep_edits: Annotated[bool, Flag("--keep-edits")] = False
    dry_run: Annotated[bool, Flag("--dry-run -n")] = False
    diff: Annotated[bool, Flag("--diff")] = False
    explain: Annotated[bool, Flag("--explain")] = False
    list_open: Annotated[bool, Flag("--list")] = False
    yes: Annotated[bool, Flag("--yes -y")] = False


class CaptureArguments(Struct, frozen=True, kw_only=True):
    """Write a redacted snapshot of this machine or of HOST, one file.

    The archive has the files that discovery reads: /sys topology, the PCI tree, settings, and the
    output of lspci, nvidia-smi, rocm-smi, amd-smi and virsh if they are installed. Give it to
    --host, or send it with a bug report.

    Options:
      output: Archive to write (.tar.gz); needed.
      ssh: Capture this host over ssh, HOST, USER@HOST or an alias of your ssh configuration.
        Nothing is installed or written on it.
      no_redact: Keep serials, UUIDs, MACs, host and user names. The file is then readable by its
        owner alone.
      force: Overwrite an existing FILE.

    Examples:
      homenode capture -o host.tar.gz
      homenode capture --ssh root@gpu7 -o gpu7.tar.gz
    """

    output: Annotated[Path, Opt("--output -o", "FILE")]
    ssh: Annotated[str | None, Opt("--ssh", "HOST")] = None
    no_redact: Annotated[bool, Flag("--no-redact")] = False
    force: Annotated[bool, Flag("--force -f")] = False


_MAKE = "Make a file"
_JUDGE = "Check a file"


class NcclTopoArguments(Struct, frozen=True, kw_only=True):
    """Write the PCIe topology file for NCCL or RCCL in a guest.

    The file has the host's PCIe tree. A guest sees neither the host's PCIe switches nor real link
    speeds: NCCL then pairs GPUs with distant NICs, and computes bandwidths from virtual ports.

    Options:
      domain: The domain XML that the VM runs with.
      plan: The saved plan, for its pins and guest NUMA nodes; domain XML and host must match the
        plan. Default: pins and nodes of the domain XML.
      guest: The guest's own view, for bus ids and nodes: ssh:HOST or a capture made inside it.
        Default: derived from the domain XML.
      nvidia_smi: Output of nvidia-smi -q -x on the host, to check whether the VM's GPUs are a
        partition of Fabric Manager. Default: the output in the host's source.
      output: Write the file here, and print the location of each device. Default: standard output.
      rccl: Write the file for AMD's RCCL. Default: for NCCL.
      cloud_init: Write a cloud-init snippet that installs the file.
      check: Check a file; with --domain also against the VM.

    Examples:
      homenode nccl-topo --domain VM.xml --plan plan.json -o topo.xml
      homenode nccl-topo --check topo.xml --domain VM.xml
    """

    host: HostOption = None
    lspci: LspciOption = None
    domain: Annotated[Path | None, Opt("--domain", "FILE", panel=_MAKE)] = None
    plan: Annotated[Path | None, Opt("--plan", "PLAN.json", panel=_MAKE)] = None
    guest: Annotated[str | None, Opt("--guest", "SOURCE", panel=_MAKE)] = None
    nvidia_smi: Annotated[Path | None, Opt("--nvidia-smi", "FILE", panel=_MAKE, rare=True)] = None
    output: Annotated[Path | None, Opt("--output -o", "FILE", panel=_MAKE)] = None
    rccl: Annotated[bool, Flag("--rccl", rare=True)] = False
    cloud_init: Annotated[Path | None, Opt("--cloud-init", "FILE", panel=_MAKE, rare=True)] = None
    check: Annotated[Path | None, Opt("--check", "FILE", panel=_JUDGE)] = None
    force: ForceOption = False
    json: JsonOption = False
