"""homenode nccl-topo: a guest's topology file for NCCL or RCCL, and whether one is right. [I/O]"""

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from msgspec.structs import replace

from homenode.check.verify.verification import load_guest
from homenode.cli.arguments.nccl import NcclTopoArguments
from homenode.cli.terminal import (
    check_can_write,
    console,
    exit_by,
    exit_if_bad,
    note,
    note_gaps,
    note_written,
    print_findings,
    print_json,
    write_text,
)
from homenode.errors import UsageError
from homenode.findings import Finding, Findings, Gap, in_order, with_gaps
from homenode.machine.pci import DeviceKind
from homenode.machine.tools.nvidia_smi import parse_query as parse
from homenode.nccl.assemble import (
    Assembled,
    assemble_topology,
    check_fabric,
    check_fabric_of_host,
    tuned_elsewhere,
)
from homenode.nccl.check import check_topology, compare_topology, flavour_of
from homenode.nccl.guest_side import STARTED, PendingDevice, guest_side, left_to_libvirt
from homenode.nccl.reader import read_topology
from homenode.nccl.topology import NcclVariant, cloud_config, write_topology
from homenode.plan.devices.fabric import may_have_nvswitches
from homenode.plan.stored import read_plan_for
from homenode.safe.input_files import read_input
from homenode.text import printable
from homenode.vm.domain.read import open_domain, vm_of
from homenode.vm.model import Vm
from homenode.vm.sources import load_host
from homenode.vm.targets.qemu_command import with_tree
from homenode.vm.targets.registry import read_vm, target_named, target_of

if TYPE_CHECKING:
    from homenode.machine.topology import Host


def nccl_topo(asked: NcclTopoArguments) -> None:
    """Make or check a topology file."""
    flavour = NcclVariant.RCCL if asked.rccl else None
    _refuse_nonsense(asked)
    if asked.check is not None:
        _judge(asked, asked.check, flavour)
        return
    check_can_write(asked.output, asked.cloud_init, force=asked.force)
    made = _assembled(asked, flavour or NcclVariant.NCCL)
    _write(made, asked.output, asked.cloud_init)
    _print_made(made, asked.output, as_json=asked.json)


def _refuse_nonsense(asked: NcclTopoArguments) -> None:
    judging = asked.check is not None
    if asked.domain is None and not judging:
        raise UsageError(
            "expected --domain to make a file for, or --check to check one, found none",
            hint="homenode nccl-topo --host H --domain VM.xml -o topo.xml",
        )
    if judging and (asked.output is not None or asked.cloud_init is not None):
        raise UsageError(
            "--check: expected no --output and no --cloud-init, found one",
            hint="make the file in one run and judge it in another",
        )
    neighbours = (asked.plan, asked.guest, asked.nvidia_smi)
    if asked.domain is None and any(one is not None for one in neighbours):
        raise UsageError("--plan, --guest and --nvidia-smi: expected --domain as well, found none")
    if asked.json and not judging and asked.output is None:
        raise UsageError("--json: expected --output for the file itself, found none")


def _placed(data: bytes, path: Path) -> "tuple[Vm, PendingDevice | None]":
    """A VM with its devices' guest addresses where its file says them, and what it leaves out."""
    name = target_of(data)
    if name is None:
        document = open_domain(data, str(path))
        return vm_of(document), left_to_libvirt(document)
    target, vm = target_named(name), read_vm(data, str(path)).guest
    if target.words_of is not None:
        vm = with_tree(vm, target.words_of(data, str(path)), str(path))
    return vm, STARTED


def _assembled(asked: NcclTopoArguments, flavour: NcclVariant) -> Assembled:
    assert asked.domain is not None, "_refuse_nonsense asks for it"
    source = str(asked.domain)
    data = read_input(asked.domain, "a domain document, or another VM file")
    facts, loose = _placed(data, asked.domain)
    host = load_host(asked.host, lspci=asked.lspci)
    plan = (
        None
        if asked.plan is None
        else read_plan_for(host, read_input(asked.plan, "a saved plan"), str(asked.plan))
    )
    guest = None if asked.guest is None else load_guest(asked.guest)
    side = guest_side(facts, loose, plan=plan, guest=guest)
    made = assemble_topology(host, side, flavour, source)
    more = [*tuned_elsewhere(facts.record, host, source)]
    more += _fabric(made, host, asked.nvidia_smi)
    return replace(made, findings=(*made.findings, *more), gaps=host.gaps)


def _fabric(made: Assembled, host: "Host", path: Path | None) -> Iterator[Finding]:
    gpus = [placed.bdf for placed in made.devices if placed.kind is DeviceKind.GPU]
    whole = [device for bdf in gpus if (device := host.device(bdf)) is not None]
    # A virtual function has the NVLinks of its physical one.
    bdfs = [gpu.physical_function or gpu.bdf for gpu in whole]
    if path is None:
        return check_fabric_of_host(bdfs, host)
    query = parse(read_input(path, "the output of nvidia-smi -q -x").decode("utf-8", "replace"))
    return check_fabric(bdfs, query, str(path)) if may_have_nvswitches(host) else iter(())


def _write(made: Assembled, output: Path | None, cloud_init: Path | None) -> None:
    text = write_topology(made.topology)
    if output is None:
        print_json(text)
    else:
        write_text(output, text)
        note_written(output)
    if cloud_init is not None:
        write_text(cloud_init, cloud_config(text))
        note(f"wrote {cloud_init}")


def _print_made(made: Assembled, output: Path | None, *, as_json: bool) -> None:
    """The table where the file is not on standard output itself; doubts to standard error."""
    findings = in_order(made.findings)
    if as_json:
        checked = Findings(checked=(_stated(made),), findings=findings)
        print_findings(with_gaps(checked, made.gaps), "topology", as_json=True)
    else:
        if output is not None:
            from homenode.show.nccl_text import topology_text

            console().print(topology_text(made))

        for finding in findings:
            note(printable(str(finding)))
        note_gaps(made.gaps)
    exit_if_bad(findings)


def _stated(made: Assembled) -> str:
    topology = made.topology
    return (
        f"{topology.flavour} topology: {len(topology.cpus)} cpus, "
        f"{sum(bool(pci.children) for pci in topology.pcis())} switches, "
        f"{len(made.devices)} devices"
    )


def _judge(asked: NcclTopoArguments, check: Path, flavour: NcclVariant | None) -> None:
    data = read_input(check, "a topology file")
    found = list(check_topology(data, str(check), flavour))
    checked = [f"{check}: what NCCL's parser refuses or silently ignores"]
    gaps: tuple[Gap, ...] = ()
    readable = not any(finding.id == "nccl-unreadable" for finding in found)
    if asked.domain is not None and readable:
        read = read_topology(data, str(check))
        made = _assembled(asked, flavour or flavour_of(read))
        found += compare_topology(read, made.topology)
        found += made.findings
        gaps = made.gaps
        checked.append(f"{asked.domain}: {_stated(made)}")
    is_empty = not found and not any(read_topology(data, str(check)).walk("pci"))
    findings = Findings(
        checked=() if is_empty else tuple(checked),
        findings=in_order(found),
        not_checked=(f"{check}: it has no device",) if is_empty else (),
    )
    findings = with_gaps(findings, gaps)
    print_findings(findings, check.name, as_json=asked.json)
    exit_by(findings)
