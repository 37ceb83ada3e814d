"""homenode nccl-topo: make or check a guest's topology file for NCCL or RCCL. [I/O]"""

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from msgspec.structs import replace

from homenode.check.verify.verification import load_guest
from homenode.cli.arguments.place import NcclTopoArguments
from homenode.cli.terminal import (
    check_can_write,
    exit_by,
    exit_if_bad,
    make_console,
    note,
    note_gaps,
    note_written,
    print_findings,
    print_json,
    write_text,
)
from homenode.doc import Doc, Table
from homenode.errors import exclusive, missing, requires
from homenode.findings import Finding, Findings, Gap, add_gaps, sort_findings
from homenode.machine.pci import DeviceKind
from homenode.machine.tools.nvidia_smi import parse_query as parse
from homenode.nccl.assemble import (
    TopologyFile,
    assemble_topology,
    check_fabric,
    check_fabric_of_host,
    check_tuned_host,
)
from homenode.nccl.check import check_topology, choose_variant, compare_topology
from homenode.nccl.guest_side import STARTED, PendingDevice, build_guest_side, make_pending
from homenode.nccl.topology import NcclVariant, read_topology, render_cloud_config, write_topology
from homenode.plan.devices.fabric import may_have_nvswitches
from homenode.plan.stored import read_plan_for
from homenode.safe.input_files import read_input
from homenode.text import command_line, plural, printable
from homenode.vm.domain.read import build_vm, open_domain
from homenode.vm.model import Vm
from homenode.vm.sources import load_host
from homenode.vm.targets.qemu_command import add_tree
from homenode.vm.targets.registry import find_target, read_vm, recognize_target

if TYPE_CHECKING:
    from homenode.machine.topology import Host


def nccl_topo(arguments: NcclTopoArguments) -> None:
    flavour = NcclVariant.RCCL if arguments.rccl else None
    _reject_nonsense(arguments)
    if arguments.check is not None:
        _judge(arguments, arguments.check, flavour)
        return
    check_can_write(arguments.output, arguments.cloud_init, force=arguments.force)
    topology_file = _assemble(arguments, flavour or NcclVariant.NCCL)
    _write(topology_file, arguments.output, arguments.cloud_init)
    _print_made(topology_file, arguments.output, as_json=arguments.json)


def _reject_nonsense(arguments: NcclTopoArguments) -> None:
    judging = arguments.check is not None
    if arguments.domain is None and not judging:
        raise missing(
            "--domain or --check", "homenode nccl-topo --host H --domain VM.xml -o topo.xml"
        )
    if judging and (arguments.output is not None or arguments.cloud_init is not None):
        other = "--output" if arguments.output is not None else "--cloud-init"
        raise exclusive("--check", other, "homenode nccl-topo --check FILE --domain VM.xml")
    neighbours = (arguments.plan, arguments.guest, arguments.nvidia_smi)
    if arguments.domain is None and any(path is not None for path in neighbours):
        raise requires("--plan, --guest or --nvidia-smi", "--domain")
    if arguments.json and not judging and arguments.output is None:
        raise requires("--json", "--output for the file itself", "--output topo.xml")


def _read_vm(data: bytes, path: Path) -> "tuple[Vm, PendingDevice | None]":
    """A VM with its devices' guest addresses as far as its file has them, and what is missing."""
    name = recognize_target(data)
    if name is None:
        document = open_domain(data, str(path))
        return build_vm(document), make_pending(document)
    target, vm = find_target(name), read_vm(data, str(path)).guest
    if target.words_of is not None:
        vm = add_tree(vm, target.words_of(data, str(path)), str(path))
    return vm, STARTED


def _assemble(arguments: NcclTopoArguments, flavour: NcclVariant) -> TopologyFile:
    assert arguments.domain is not None, "_reject_nonsense asks for it"
    source = str(arguments.domain)
    data = read_input(arguments.domain, "a VM", hint="virsh dumpxml NAME > VM.xml")
    facts, loose = _read_vm(data, arguments.domain)
    host = load_host(arguments.host, lspci=arguments.lspci)
    plan = (
        None
        if arguments.plan is None
        else read_plan_for(
            host,
            read_input(
                arguments.plan, "a saved plan", hint="homenode plan --save-plan FILE writes one"
            ),
            str(arguments.plan),
        )
    )
    guest = None if arguments.guest is None else load_guest(arguments.guest)
    side = build_guest_side(facts, loose, plan=plan, guest=guest)
    topology_file = assemble_topology(host, side, flavour, source)
    findings = [*check_tuned_host(facts.record, host, source)]
    findings += _check_fabric(topology_file, host, arguments.nvidia_smi)
    return replace(topology_file, findings=(*topology_file.findings, *findings), gaps=host.gaps)


def _check_fabric(file: TopologyFile, host: "Host", path: Path | None) -> Iterator[Finding]:
    gpus = [placed.bdf for placed in file.devices if placed.kind is DeviceKind.GPU]
    devices = [device for bdf in gpus if (device := host.find_device(bdf)) is not None]
    # A virtual function has the NVLinks of its physical one.
    bdfs = [gpu.physical_function or gpu.bdf for gpu in devices]
    if path is None:
        return check_fabric_of_host(bdfs, host)
    query = parse(read_input(path, "the output of nvidia-smi -q -x").decode("utf-8", "replace"))
    return check_fabric(bdfs, query, str(path)) if may_have_nvswitches(host) else iter(())


def _write(topology_file: TopologyFile, output: Path | None, cloud_init: Path | None) -> None:
    text = write_topology(topology_file.topology)
    if output is None:
        print_json(text)
    else:
        write_text(output, text)
        note_written(output)
    if cloud_init is not None:
        write_text(cloud_init, render_cloud_config(text))
        note(f"wrote {cloud_init}")


def _build_cpu_table(topology_file: TopologyFile) -> Table:
    rows = tuple(
        (
            str(cpu.numa_id),
            str(cpu.affinity),
            str(sum(not pci.children for child in cpu.children for pci in child.walk())),
        )
        for cpu in topology_file.topology.cpus
    )
    return Table(heads=("cpu", "vCPUs", "devices"), rows=rows, folds=("vCPUs",))


def _build_device_table(topology_file: TopologyFile) -> Table:
    """Return every device with its two addresses and its switch."""
    heads = ("host BDF", "kind", "host node", "guest bus id", "switch")
    rows = tuple(
        (*map(str, (device.bdf, device.kind, device.node)), device.bus_id, device.switch or "none")
        for device in topology_file.devices
    )
    return Table(heads=heads, rows=rows)


def _print_made(topology_file: TopologyFile, output: Path | None, *, as_json: bool) -> None:
    """Print the table unless the file goes to standard output; findings go to standard error."""
    findings = sort_findings(topology_file.findings)
    if as_json:
        checks = Findings(checked=(_describe(topology_file),), findings=findings)
        print_findings(add_gaps(checks, topology_file.gaps), "topology", as_json=True)
    else:
        if output is not None:
            title = f"{output.name}: {_describe(topology_file)}"
            make_console().print(
                Doc(title, (_build_cpu_table(topology_file), _build_device_table(topology_file)))
            )
        for finding in findings:
            note(printable(str(finding)))
        note_gaps(topology_file.gaps)
    exit_if_bad(findings)


def _describe(topology_file: TopologyFile) -> str:
    """Return the contents of the file in numbers: "2 CPUs, 8 switches, 8 GPUs"."""
    topology, kinds = topology_file.topology, [device.kind for device in topology_file.devices]
    names = {DeviceKind.GPU: "GPU", DeviceKind.NIC: "NIC", DeviceKind.NVSWITCH: "NVSwitch"}
    counts = {
        "CPU": len(topology.cpus),
        "switch": sum(bool(pci.children) for pci in topology.list_pcis()),
        **{name: kinds.count(kind) for kind, name in names.items()},
    }
    return ", ".join(
        plural(count, name, f"{name}es" if name.endswith("ch") else None)
        for name, count in counts.items()
        if count
    )


def _judge(arguments: NcclTopoArguments, check: Path, flavour: NcclVariant | None) -> None:
    data = read_input(check, "a topology file")
    problems = list(check_topology(data, str(check), flavour))
    checks = ["what NCCL's parser rejects or silently ignores"]
    not_checked = "that it is of a VM: --domain VM.xml --host HOST compares it"
    answer, gaps = f"{check.name}: correct for NCCL", tuple[Gap, ...]()
    readable = not any(finding.id == "nccl-unreadable" for finding in problems)
    if arguments.domain is not None and readable:
        read = read_topology(data, str(check))
        topology_file = _assemble(arguments, flavour or choose_variant(read))
        host = () if arguments.host is None else ("--host", arguments.host)
        words = ("--domain", arguments.domain, *host, "-o", check, "--force")
        command = command_line("homenode", "nccl-topo", *words)
        comparison = compare_topology(read, topology_file.topology)
        problems += [replace(difference, fix=command) for difference in comparison]
        problems += topology_file.findings
        gaps, not_checked = topology_file.gaps, ""
        checks.append(f"each device's CPU, links and switch group in {arguments.domain.name}")
        as_in = f"{_describe(topology_file)} as in {arguments.domain.name}"
        answer = f"{check.name}: correct: {as_in}"
    is_empty = not problems and not any(read_topology(data, str(check)).walk("pci"))
    if is_empty:
        checks, not_checked = [], f"{check.name}: it has no device"
    findings = Findings(
        checked=tuple(checks),
        findings=sort_findings(problems),
        not_checked=tuple(filter(None, (not_checked,))),
    )
    findings = add_gaps(findings, gaps)
    print_findings(findings, check.name, answer=answer, as_json=arguments.json)
    exit_by(findings)
