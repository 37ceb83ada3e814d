"""Preparation: from orders and a machine to a run, before anything is written.

For the suite, a job's cpuset and requested CPUs or nodes are a smaller machine. Nothing outside of
it is measured.
"""

import hashlib
from collections.abc import Callable, Collection, Iterator, Mapping

from msgspec import Struct
from msgspec.structs import replace

from homenode.bdf import Bdf
from homenode.check.doctor.links import link_health
from homenode.check.verify.expectation import Expectation, build_expectation
from homenode.check.verify.guest_checks import view_of_guest
from homenode.cpuset import CpuSet
from homenode.errors import UsageError
from homenode.findings import Finding, Gap, are_bad
from homenode.machine.pci import DeviceKind
from homenode.machine.snapshot.protocol import Snapshot
from homenode.machine.topology import Host
from homenode.measure.environment import is_emulated_cpu
from homenode.measure.model import (
    CONTROLS,
    PROBE,
    AppCommand,
    BenchOptions,
    BenchTest,
    Reader,
    Suite,
    SuiteGroup,
    choose_cpus,
)
from homenode.measure.results.model import (
    CPU_ONLY,
    UNKNOWN_SWITCHES,
    Condition,
    GpuPlace,
    Origin,
    RunHead,
    Switches,
    host_kind,
    list_hardware,
    name_system,
)
from homenode.measure.results.vantage import Vantage
from homenode.measure.run_directory import RunRecord
from homenode.measure.suite import ShownGpus, build_suite
from homenode.process import install_hint
from homenode.vm.domain.read import build_vm, open_domain
from homenode.vm.guest_observation import map_guest_paths
from homenode.vm.model import Vm
from homenode.vm.plan import Plan, vm_as_it_runs

APP_TEST = "app"


class PreparedRun(Struct, frozen=True):
    record: RunRecord  # what would be run
    host: Host  # the machine as the run may use it
    pus: CpuSet  # that measure
    # how a guest differs from its plan; not empty = nothing should be measured
    mismatch: tuple[Finding, ...]


def prepare_run(
    options: BenchOptions,
    host: Host,
    programs: Collection[str],
    boot: str,
    memory_nodes: tuple[int, ...] | None = None,
    shown_gpus: ShownGpus | None = None,
    own_pus: CpuSet | None = None,
) -> PreparedRun:
    """Return the run of these orders on a machine. programs: available programs. memory_nodes,
    own_pus: allowed by cpuset and affinity; None = all. shown: GPUs that the driver shows.

    Raises UsageError for tests, CPUs or nodes that the machine does not have, InputError for a
    malformed document.
    """
    facts = _read_facts(options)
    expected = None
    if options.plan is not None and options.vantage is Vantage.GUEST:
        vm = vm_as_it_runs(options.plan, facts)
        expected = build_expectation(vm, document=facts)
    mismatch: tuple[Finding, ...] = ()
    if expected is not None:
        mismatch = tuple(
            finding
            for finding in view_of_guest(expected, host, None).findings
            if are_bad((finding,))
        )
    pus = choose_cpus(options)
    usable = confine(restrict_host(host, own_pus), pus, options.nodes)
    usable = _keep_allowed_memory(usable, options.nodes, memory_nodes)
    suite = _build_suite(options, usable, programs, shown_gpus)
    if options.vantage is Vantage.JOB and options.experiment is not None:
        # A study has one binding per run: other nodes are in other runs.
        tests = tuple(keep_binding(test) for test in suite.tests if test.node is None)
        suite = Suite(tuple(filter(keeps_to_nodes, tests)), suite.omitted)
    if len(usable.nodes) < len(host.nodes):
        suite = _omit(suite, lambda test: not keeps_to_nodes(test), "a cpuset excludes nodes")
    if pus is not None or options.nodes is not None:
        suite = _bind_suite(suite, usable, options.nodes, programs)
    bus_ids = _map_bus_ids(expected, host)
    record = RunRecord(
        head=replace(_build_head(options, host, usable, facts, bus_ids), boots=(boot,)),
        tests=suite.tests,
        controls=tuple(test.id for test in suite.tests if test.is_control),
        repeats=options.repeats,
        seed=options.seed,
        machine=_identify_machine(host),
        boot=boot,
        app=options.app,
        omitted=suite.omitted,
        marks=(
            *options.marks,
            *(f"the guest is not as planned: {finding}" for finding in mismatch),
        ),
        bus_ids=bus_ids,
    )
    return PreparedRun(record, usable, usable.usable_pus, mismatch)


def _read_facts(options: BenchOptions) -> Vm | None:
    if options.domain_xml is None:
        return None
    return build_vm(open_domain(options.domain_xml, "domain XML"))


def _build_suite(
    orders: BenchOptions, host: Host, programs: Collection[str], shown_gpus: ShownGpus | None
) -> Suite:
    options = orders.suite
    if orders.app is not None and not options.groups:
        options = replace(options, groups=(*sorted(CONTROLS), SuiteGroup.APP))
    try:
        suite = build_suite(host, programs, options, shown_gpus)
    except UsageError as error:
        if orders.app is None:
            raise
        suite = Suite((), (Gap("tests next to the program", error.message),))
    if orders.app is None:
        return suite
    return Suite((*suite.tests, _make_app_test(orders.app)), suite.omitted)


def _make_app_test(app: AppCommand) -> BenchTest:
    seconds = min(60.0, app.timeout_s)  # unknown; progress is estimated after the first round
    return BenchTest(APP_TEST, SuiteGroup.APP, app.argv, seconds, app.timeout_s, reads=Reader.APP)


def _keep_allowed_memory(
    host: Host, nodes: tuple[int, ...] | None, memory_nodes: tuple[int, ...] | None
) -> Host:
    """The machine without nodes whose memory our cpuset does not allow. Raises UsageError."""
    if memory_nodes is None:
        return host
    kept_out = [number for number in nodes or () if number not in memory_nodes]
    if kept_out:
        raise UsageError(
            f"--nodes: expected nodes that the cpuset allows, found {kept_out[0]}",
            hint="request memory of that node in the job, or allow the node in the cgroup",
        )
    return replace(host, nodes=tuple(node for node in host.nodes if node.index in memory_nodes))


def _bind_suite(
    suite: Suite, host: Host, nodes: tuple[int, ...] | None, programs: Collection[str]
) -> Suite:
    """Return the suite on some CPUs: GPU tools and the user's program are kept to them by taskset,
    and their memory to the nodes by numactl."""
    needed_programs = {"taskset": "to keep it on its CPUs"}
    if nodes is not None:
        needed_programs["numactl"] = "to keep its memory on these nodes"
    for program, purpose in needed_programs.items():
        if program not in programs:
            reason = f"{program}: command not found; {install_hint(program)} {purpose}"
            suite = _omit(suite, lambda test: test.reads is not Reader.PROBE, reason)
    pus, of_node = host.usable_pus, {int(node.index): node.pus for node in host.nodes}
    tests = tuple(bind(test, pus, nodes, of_node) for test in suite.tests)
    return Suite(tests, suite.omitted)


def _omit(suite: Suite, is_unwanted: Callable[[BenchTest], bool], reason: str) -> Suite:
    unwanted_tests = [Gap(test.id, reason) for test in suite.tests if is_unwanted(test)]
    tests = tuple(test for test in suite.tests if not is_unwanted(test))
    return Suite(tests, (*suite.omitted, *unwanted_tests))


def _build_head(
    options: BenchOptions,
    host: Host,
    usable: Host,
    document: Vm | None,
    bus_ids: tuple[tuple[Bdf, Bdf], ...],
) -> RunHead:
    plan, in_guest = options.plan, options.vantage is Vantage.GUEST
    switches = options.switches
    if switches == UNKNOWN_SWITCHES and plan is not None and in_guest:
        switches = Switches.from_layout(plan.layout)
    gpus = host.devices_of_kind(DeviceKind.GPU)
    on_host = dict(bus_ids)
    pinned_cpus = None if plan is None or not plan.vcpu_pins else CpuSet.union(plan.vcpu_pins)
    nodes = [node.index for node in usable.nodes]
    plan_host = None
    if in_guest and plan is not None:
        nodes, plan_host = list(plan.nodes), plan.host_fingerprint or None
    # A guest's ports are made by its hypervisor, and do not show the real links.
    faults = () if in_guest else link_health(host)
    return RunHead(
        name=options.name,
        system=options.system or (name_system(gpus[0].name) if gpus else CPU_ONLY),
        origin=Origin.EMULATED if options.emulated or is_emulated_cpu(host) else Origin.MEASURED,
        vantage=options.vantage,
        switches=switches,
        host_kind=options.host_kind if in_guest else options.host_kind or host_kind(host),
        host=options.host or (plan_host if in_guest else host.fingerprint),
        arrangement=options.arrangement,
        memory_mode=None if plan is None or plan.memory_mode is None else str(plan.memory_mode),
        page_bytes=None if plan is None else plan.vm.page_bytes,
        vcpus=len(host.online_pus) if in_guest else None,
        pus=pinned_cpus if in_guest else usable.usable_pus,
        nodes=None if in_guest and plan is None else tuple(map(int, nodes)),
        plan_fingerprint=None if plan is None else plan_fingerprint(plan),
        gpus=tuple(GpuPlace(on_host.get(gpu.bdf, gpu.bdf), gpu.node) for gpu in gpus),
        host_addresses=not in_guest or (bool(gpus) and all(gpu.bdf in on_host for gpu in gpus)),
        conditions=tuple(_list_versions(options, host, document)),
        experiment=options.experiment,
        block=options.block,
        hardware=list_hardware(host),
        unusable=tuple(f"{fault.id}: {fault.subject}: {fault.observed}" for fault in faults),
    )


def plan_fingerprint(plan: Plan) -> str:
    """Return a fingerprint that is the same for equal plans alone."""
    from homenode.plan.stored import encode_plan

    return hashlib.sha256(encode_plan(plan).encode()).hexdigest()


def _identify_machine(host: Host) -> str:
    """Return the measured machine's identity. Guests are distinguished only by their topology."""
    lines = (host.fingerprint, str(host.cpu), str(host.settings.kernel_release))
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def _list_versions(options: BenchOptions, host: Host, document: Vm | None) -> Iterator[Condition]:
    yield from options.versions
    names = {condition.name for condition in options.versions}
    # A guest's versions are those of the host that started it.
    conditions = [] if options.vantage is Vantage.GUEST else list(list_host_versions(host))
    if document is not None and document.machine is not None:
        conditions.append(Condition("machine type", document.machine))
    yield from (version for version in conditions if version.name not in names)
    drivers = sorted({gpu.driver for gpu in host.devices_of_kind(DeviceKind.GPU) if gpu.driver})
    if drivers:
        yield Condition("driver", ", ".join(drivers))


def list_host_versions(host: Host) -> Iterator[Condition]:
    """Yield the versions of the libvirt and QEMU that run a host's guests."""
    settings = host.settings
    for name, version in (("libvirt", settings.libvirt_version), ("qemu", settings.qemu_version)):
        if version is not None:
            yield Condition(name, ".".join(map(str, version)))


def _map_bus_ids(expectation: Expectation | None, guest: Host) -> tuple[tuple[Bdf, Bdf], ...]:
    """Return (guest address, host address) of each passed-through function that is found."""
    if expectation is None:
        return ()
    address_of = map_guest_paths(guest)
    return tuple(
        (address_of[device.path], device.bdf)
        for device in expectation.devices
        if device.path is not None and device.path in address_of
    )


_STATUS = "/proc/self/status"


def read_allowed_nodes(snapshot: Snapshot) -> tuple[int, ...] | None:
    """Return the nodes that the cpuset allows for memory; None = unknown."""
    node_list = _read_list(snapshot, "Mems_allowed_list")
    return None if node_list is None else tuple(node_list)


def read_affinity(snapshot: Snapshot) -> CpuSet | None:
    """Return the CPUs that homenode's threads may use, by cpuset, taskset or srun; None = unknown.
    A host is discovered by its cgroups alone: taskset does not limit a VM."""
    return _read_list(snapshot, "Cpus_allowed_list") or None


def _read_list(snapshot: Snapshot, field: str) -> CpuSet | None:
    for line in (snapshot.read_text(_STATUS) or "").splitlines():
        key, _, value = line.partition(":")
        if key == field:
            return CpuSet.parse(value, _STATUS)
    return None


def restrict_host(host: Host, pus: CpuSet | None) -> Host:
    """Return the host with only these CPUs allowed; None = unchanged."""
    if pus is None:
        return host
    return replace(
        host,
        pus=tuple(replace(pu, allowed=pu.allowed and pu.index in pus) for pu in host.pus),
    )


def keeps_to_nodes(test: BenchTest) -> bool:
    """Return whether a test can be limited to some nodes. The probe's matrices use all nodes."""
    return test.argv[0] != PROBE or "--matrix" not in test.argv


def confine(host: Host, pus: CpuSet | None, nodes: tuple[int, ...] | None) -> Host:
    """Return the machine with these CPUs and nodes alone; None = all that may be used. Raises
    UsageError for CPUs or nodes that are missing or that the cpuset excludes."""
    usable = host.usable_pus
    if pus is not None and not pus <= usable:
        raise UsageError(
            f"--cpus {pus}: expected CPUs of {usable}, found {pus - usable} next to them",
            hint="the others are offline, absent, or excluded by a cpuset or an affinity",
        )
    pus_wanted = usable if pus is None else pus
    if nodes is not None:
        node_of_index = {int(node.index): node for node in host.nodes}
        missing = [number for number in nodes if number not in node_of_index]
        if missing:
            raise UsageError(
                f"--nodes: expected nodes of {', '.join(map(str, node_of_index))}, found "
                f"{', '.join(map(str, missing))}"
            )
        pus_wanted &= CpuSet.union(node_of_index[number].pus for number in nodes)
    if not pus_wanted:
        raise UsageError("--cpus, --nodes: no CPU is in both")
    return replace(
        host,
        pus=tuple(replace(pu, allowed=pu.allowed and pu.index in pus_wanted) for pu in host.pus),
        nodes=tuple(
            replace(node, pus=node.pus & pus_wanted)
            for node in host.nodes
            if nodes is None or int(node.index) in nodes
        ),
    )


def keep_binding(test: BenchTest) -> BenchTest:
    """A test that keeps its binding: nvbandwidth otherwise moves itself to the GPU's CPUs."""
    alternatives = tuple(keep_binding(other) for other in test.alternatives)
    return replace(test, argv=_keep_affinity(test.argv), alternatives=alternatives)


def _keep_affinity(argv: tuple[str, ...]) -> tuple[str, ...]:
    if "nvbandwidth" not in argv or "-d" in argv:
        return argv
    at = argv.index("nvbandwidth") + 1
    return (*argv[:at], "-d", *argv[at:])


def bind(
    test: BenchTest, pus: CpuSet, nodes: tuple[int, ...] | None, pus_of_node: Mapping[int, CpuSet]
) -> BenchTest:
    """Return a test kept to these CPUs and nodes. The probe pins its own threads; taskset keeps
    others, and numactl their memory. pus_of_node: those of them that each node has."""
    return replace(
        test,
        argv=_bound_argv(test, pus, nodes, pus_of_node),
        alternatives=tuple(bind(other, pus, nodes, pus_of_node) for other in test.alternatives),
    )


def _bound_argv(
    test: BenchTest, pus: CpuSet, nodes: tuple[int, ...] | None, pus_of_node: Mapping[int, CpuSet]
) -> tuple[str, ...]:
    if test.argv[0] == PROBE:
        takes_node = test.argv[1] in ("bandwidth", "latency", "loaded-latency")
        if nodes is not None and len(nodes) == 1 and takes_node and "--matrix" not in test.argv:
            return (*test.argv, "--node", str(nodes[0]))
        return test.argv
    argv = _keep_affinity(test.argv)
    if argv[0] == "numactl" and test.node is not None:
        # numactl takes all CPUs of the node: its child is limited to the allowed CPUs.
        at = next(n for n, word in enumerate(argv) if n > 0 and not word.startswith("-"))
        node_pus = pus_of_node.get(int(test.node), pus)
        return (*argv[:at], "taskset", "-c", str(node_pus), *argv[at:])
    memory = () if nodes is None else ("numactl", f"--membind={','.join(map(str, nodes))}")
    return (*memory, "taskset", "-c", str(pus), *argv)
