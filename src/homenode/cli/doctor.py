"""homenode doctor: findings on one host, or differences between many. [I/O]"""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from msgspec import Struct, structs

from homenode.bdf import Bdf
from homenode.check.doctor.diagnosis import (
    MeasuredRates,
    diagnose,
    list_judged_areas,
)
from homenode.cli.arguments.check import DoctorArguments
from homenode.cli.terminal import (
    counting,
    exit_by,
    note,
    print_file,
    print_findings,
)
from homenode.errors import (
    HomenodeError,
    InputError,
    UsageError,
    exclusive,
    find_near,
    requires,
)
from homenode.findings import (
    Call,
    Findings,
    GapKind,
    add_gaps,
    format_shared_gaps,
    sort_findings,
    with_call,
)
from homenode.machine.pci import DeviceKind
from homenode.process import find_program
from homenode.safe.input_files import read_input, read_subject
from homenode.text import command_line, plural, printable, shorten_list
from homenode.units import MIB
from homenode.vm.domain.read import open_domain
from homenode.vm.sources import (
    is_host_source,
    load_host,
    load_host_of,
    names_domain,
    read_matrices,
    split_sources,
)
from homenode.vm.targets.qemu_command import read_command_line
from homenode.vm.targets.registry import (
    add_host_facts,
    find_target,
    read_vm,
    recognize_target,
)
from homenode.vm.targets.target import parse_pins

if TYPE_CHECKING:
    from homenode.machine.topology import Host
    from homenode.vm.domain.document import Document
    from homenode.vm.model import Vm


class _VmSource(Struct, frozen=True):
    name: str
    document: "Document | None"  # libvirt's definition; None for another hypervisor
    vm: "Vm | None"  # VM of another hypervisor
    target: str = "qemu"  # that hypervisor
    unread: str = ""  # the script with the CPUs of each vCPU, if it is not next to the file
    is_command: bool = False  # a command line of QEMU, which plan does not read

    @property
    def words(self) -> Call:
        """The words by which homenode plan takes the VM."""
        if self.vm is None or not self.is_command:
            return ((self.name,),)
        sizes = {"--vcpus": str(self.vm.vcpus), "--memory": f"{self.vm.memory_bytes // MIB}MiB"}
        devices = (("--device", str(device.bdf)) for device in self.vm.hostdevs)
        return (("--target", "qemu"), *sizes.items(), *devices)


def doctor(arguments: DoctorArguments) -> None:
    """Print the findings; exit 1 for a critical finding or a warning, 5 if nothing was checked."""
    if arguments.pool:
        options = (arguments.files, arguments.host, arguments.expect)
        if any(options) or arguments.under_load or arguments.prometheus:
            raise exclusive("--pool", "another source of a host or VM", _POOL)
        compare_hosts(arguments.pool, as_json=arguments.json, explain=arguments.explain)
        return
    if arguments.json and arguments.prometheus:
        raise exclusive("--json", "--prometheus", "homenode doctor --json")
    domains = [name for name in arguments.files if names_domain(name)]
    sources = [
        name for name in arguments.files if name not in (*domains, "-") and is_host_source(name)
    ]
    files = [name for name in arguments.files if name not in (*domains, *sources)]
    if sources and arguments.host is not None:
        raise exclusive("--host", sources[0], command_line("homenode", "doctor", *sources))
    rates = _parse_rates(arguments.h2d, arguments.known_width)
    loaded = (
        load_host_of(sources, lspci=arguments.lspci)
        if sources
        else load_host(arguments.host, lspci=arguments.lspci)
    )
    _check_addresses(rates, loaded)
    if arguments.under_load or arguments.load_command is not None:
        if not arguments.under_load:
            raise requires("--load-command", "--under-load", _LOAD)
        if sources or arguments.host is not None or arguments.lspci is not None:
            raise exclusive("--under-load", "another host", _LOAD)
        loaded, rates = _measure_under_load(loaded, rates, arguments.load_command)
    vms = [*(_read_file_vm(name, loaded) for name in files), *map(_read_domain_vm, domains)]
    findings = _diagnose_all(loaded, vms, rates, explain=arguments.explain or arguments.json)
    findings = _add_matrices(findings, sources or [arguments.host] if arguments.host else sources)
    if arguments.expect is not None:
        shows_checked = arguments.explain or arguments.json
        findings = _add_drift(findings, loaded, arguments.expect, shows_checked=shows_checked)
    # Without another question it is about this machine, whose VMs are a part of it.
    asks_vms = not (sources or vms or arguments.host or arguments.expect)
    findings = add_gaps(findings, loaded.gaps, asks_vms=asks_vms)
    bases, listings = split_sources(sources, arguments.lspci)
    host = bases[0] if len(bases) == 1 else "SOURCE" if bases else arguments.host
    call: list[tuple[str, ...]] = [*vms[0].words] if len(vms) == 1 else [("VM",)]
    call += [] if host is None else [("--host", host)]
    call += [("--lspci", str(listing)) for listing in listings]
    findings = structs.replace(findings, findings=with_call(findings.findings, call))
    if arguments.prometheus:
        from homenode.show.findings_text import format_prometheus

        print_file(format_prometheus(findings, {"host": loaded.name}))
    else:
        subject = ", ".join(Path(vm.name).name for vm in vms) or loaded.name
        is_unread = asks_vms and any(gap.kind is GapKind.VMS for gap in loaded.gaps)
        labels = {"next": _format_libvirt_step() if is_unread else ""}
        print_findings(
            findings, subject, as_json=arguments.json, explain=arguments.explain, labels=labels
        )
    exit_by(findings)


def _add_drift(findings: Findings, host: "Host", baseline: str, *, shows_checked: bool) -> Findings:
    """Return the findings, and the differences of the host from a capture made earlier."""
    from homenode.check.doctor.baseline import find_drift, record_of

    record, present = record_of(load_host(baseline)), record_of(host)
    areas = f"differences from {baseline}"
    if shows_checked:
        areas = f"{baseline}: topology, devices, links and settings"
    findings = structs.replace(
        findings,
        checked=(*findings.checked, areas),
        findings=sort_findings((*findings.findings, *find_drift(record, host, baseline))),
    )
    if all(record[fact] is None or present.get(fact) is None for fact in record):
        return structs.replace(findings, checked=(), not_checked=(baseline,))
    return findings


def _diagnose_all(
    host: "Host", vms: Sequence[_VmSource], rates: MeasuredRates, *, explain: bool
) -> Findings:
    """The findings on the host and each VM on it; without `explain` a line per checked fact."""
    answers = [_diagnose_vm(host, vm, rates) for vm in vms] or [diagnose(host, None, rates)]
    findings = sort_findings(
        dict.fromkeys(finding for answer in answers for finding in answer.findings)
    )
    if not vms and not list_judged_areas(host):
        return Findings(
            checked=(),
            findings=findings,
            not_checked=(f"{host.name} shows no links, nodes or settings",),
        )
    shown_count = None if explain else 2 if vms else 1
    lines = dict.fromkeys(line for answer in answers for line in answer.checked[:shown_count])
    not_checked = tuple(line for answer in answers for line in answer.not_checked)
    return Findings(checked=tuple(lines), findings=findings, not_checked=not_checked)


def _diagnose_vm(host: "Host", vm: _VmSource, rates: MeasuredRates) -> Findings:
    answer = diagnose(host, vm.document, rates, vm.vm, vm.target)
    if not vm.unread:
        return answer
    findings = tuple(f for f in answer.findings if f.id not in _OF_EACH_VCPU)
    not_checked = (f"CPUs of each vCPU of {vm.name}: {vm.unread} is missing",)
    return structs.replace(answer, findings=findings, not_checked=not_checked)


_OF_EACH_VCPU = ("pin-off-node", "threads-not-siblings")
"""Findings that need more than the CPUs of all threads together."""


def _add_matrices(answer: Findings, sources: Sequence[str]) -> Findings:
    """Return the findings with those of `nvidia-smi topo -m` outputs: a host record has no GPUs
    without addresses."""
    matrices = read_matrices(sources)
    if not matrices:
        return answer
    from homenode.check.doctor.devices import check_matrix, describe_matrix

    texts = {name: describe_matrix(matrix) for name, matrix in matrices.items()}
    lines = [f"{name}: {text}" for name, text in texts.items() if text]
    if not lines:
        return answer
    matrix_faults = [
        fault for name, matrix in matrices.items() for fault in check_matrix(matrix, name)
    ]
    findings = sort_findings((*answer.findings, *matrix_faults))
    return structs.replace(
        answer,
        checked=(*answer.checked, *lines),
        findings=findings,
        not_checked=answer.not_checked if answer.checked else (),
    )


def _measure_under_load(
    host: "Host", rates: MeasuredRates, command: str | None
) -> "tuple[Host, MeasuredRates]":
    """Return the host with its links under a copy load, and the copy's own report."""
    import shlex

    from homenode.machine.snapshot.live import LiveSnapshot
    from homenode.measure.gpu_load_sampling import load_program, sample_under_load

    try:
        words = None if command is None else shlex.split(command)
    except ValueError as error:
        raise UsageError(
            f"--load-command: not words of a shell: {command!r}: {error}", hint=_LOAD
        ) from None
    if words == []:
        raise UsageError("--load-command: missing program", hint=_LOAD)
    program = load_program(words)
    note(f"running {' '.join(program.argv)} and reading links during the copy")
    busy, reached_bdfs = sample_under_load(host, LiveSnapshot(), program)
    # Rates from the user take precedence over rates measured during the load.
    h2d = {gpu: rate for gpu, rate in reached_bdfs.h2d.items() if rates.h2d_all is None}
    return busy, structs.replace(
        rates, is_loaded=True, reached=reached_bdfs.gpus, h2d={**h2d, **rates.h2d}
    )


def _read_domain_vm(name: str) -> _VmSource:
    from homenode.process import run
    from homenode.vm.hypervisor.connection import DEFAULT
    from homenode.vm.hypervisor.virsh import Virsh

    try:
        uuid = Virsh(DEFAULT).find_domain(name).uuid  # the error names the domains
    except HomenodeError as error:
        if find_near(name, ("retrain",)):
            error.hint = f"{error.hint}; did you mean retrain?"
        raise
    argv = ("virsh", "-q", "-r", "-c", "qemu:///system", "dumpxml", "--", uuid)
    content = run(argv, 30).stdout_or_raise().encode()
    return _VmSource(name, open_domain(content, name), None)


def _read_file_vm(name: str, host: "Host") -> _VmSource:
    """Return the VM of a file, on its host. Raises InputError for a file that is neither a VM's nor
    a host's."""
    content = read_subject(name, "a file of a VM or a host")
    if b"<domain" in content[:_HEAD_BYTES] or content[:2] in _UTF_16:
        return _VmSource(name, open_domain(content, name), None)
    target = recognize_target(content)
    if target is None and name.endswith(".conf") and find_target("proxmox").may_be(content):
        target = "proxmox"
    if target is not None:
        vm, script = add_host_facts(read_vm(content, name, target), host).guest, ""
        suffix = find_target(target).hook_suffix
        if suffix is not None and b"\nhookscript:" in content:
            script = f"{name}{suffix}"
        if script and Path(script).is_file():
            text = read_input(script, "a hook script").decode("utf-8", "replace")
            pins, emulator, _ = parse_pins(text)
            vm = structs.replace(vm, vcpu_pins=pins or vm.vcpu_pins, emulator_pus=emulator)
            script = ""
        return _VmSource(name, None, vm, target, script)
    command = read_command_line(content.decode(errors="replace"), name)
    if command is None:
        raise InputError(
            f"{name}: neither a VM (libvirt's XML, a configuration of qm or xl, a command line of "
            "QEMU) nor a host (a capture, a tree of /sys, hwloc's XML, host.toml, host.json, "
            "output of lspci -vvv, numactl -H, lscpu -e, xl info -n or nvidia-smi topo -m)",
            hint="virsh dumpxml --inactive NAME > VM.xml",
        )
    return _VmSource(name, None, command, is_command=True)


_POOL = "homenode doctor --pool captures/"
_WIDTH = "homenode doctor --known-width 41:00.0=8"
_LOAD = "homenode doctor --under-load --load-command nvbandwidth"

_HEAD_BYTES = 1 << 16
_UTF_16 = (b"\xff\xfe", b"\xfe\xff", b"<\0", b"\0<")


def _format_libvirt_step() -> str:
    """Return the hint that makes this machine's VMs readable."""
    is_missing = find_program("virsh") is None
    return "apt install libvirt-clients" if is_missing else "systemctl start libvirtd"


def _parse_rates(h2d: Sequence[str], known_width: Sequence[str]) -> MeasuredRates:
    rates: dict[Bdf, float] = {}
    everyone: float | None = None
    for text in h2d:
        name, equals, value = text.rpartition("=")
        if equals:
            rates[Bdf.parse(name, "--h2d")] = _parse_rate(value)
        else:
            everyone = _parse_rate(value)
    widths: dict[Bdf, int] = {}
    for text in known_width:
        name, _, lanes = text.partition("=")
        if lanes.removeprefix("x") not in ("1", "2", "4", "8", "16"):
            raise UsageError(f"--known-width: not BDF=LANES: {text!r}", hint=_WIDTH)
        widths[Bdf.parse(name, "--known-width")] = int(lanes.removeprefix("x"))
    return MeasuredRates(known_widths=widths, h2d=rates, h2d_all=everyone)


def _check_addresses(rates: MeasuredRates, host: "Host") -> None:
    """Raise UsageError for a device that the host does not have: it would count for nothing."""
    for option, bdfs in (("--h2d", rates.h2d), ("--known-width", rates.known_widths)):
        for bdf in bdfs:
            device = host.find_device(bdf)
            if device is None:
                raise UsageError(
                    f"{option}: no device {bdf} on {host.name}",
                    hint="homenode show --explain lists them",
                )
            if option == "--h2d" and device.kind is not DeviceKind.GPU:
                raise UsageError(
                    f"--h2d: {bdf} is a {device.kind}, not a GPU", hint="homenode show"
                )


def _parse_rate(text: str) -> float:
    """Return the Bytes/s of --h2d, a number of GB/s."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < 1e6:
        raise UsageError(
            f"--h2d: expected a number of GB/s above 0 and below 1000000, found {text[:60]!r}",
            hint="homenode doctor --h2d 53.5",
        )
    return value * 1e9


def compare_hosts(sources: Sequence[str], *, as_json: bool, explain: bool) -> None:
    """Print differences of hosts from the majority of their kind; exit 1 if there are any."""
    from homenode.check.doctor.baseline import MIN_HOSTS, compare_fleet

    hosts = _read_hosts(sources)
    differences, kinds, names = compare_fleet(hosts)
    counts = ((kind, count) for kind, count in kinds.items() if count >= MIN_HOSTS)
    alone = f"{shorten_list(map(printable, names), 2)}: fewer than {MIN_HOSTS} of a kind"
    findings = Findings(
        checked=tuple(f"{plural(count, 'host')}: {kind}" for kind, count in counts),
        findings=tuple(difference.make_finding() for difference in differences),
        not_checked=(alone,) if names else (),
        unknown=format_shared_gaps((name, host.gaps) for name, host in hosts),
    )
    print_findings(findings, plural(len(hosts), "host"), as_json=as_json, explain=explain)
    exit_by(findings)


def _read_hosts(sources: Sequence[str]) -> "list[tuple[str, Host]]":
    from homenode.vm.host_sources import read_hosts

    with counting("reading hosts") as progress:
        named_hosts = read_hosts(sources, progress)
    for unread in named_hosts.unread:
        note(f"not read  {unread}")
    return [(entry.name, entry.host) for entry in named_hosts.hosts]
