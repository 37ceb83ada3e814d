"""homenode pod and kubevirt: whether a kubelet admits a pod; the hook, checks, manifests. [I/O]"""

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from msgspec.structs import replace

from homenode import __version__
from homenode.bdf import Bdf
from homenode.cli.arguments.cluster import (
    KubevirtCheckArguments,
    KubevirtFitArguments,
    KubevirtManifestArguments,
    KubevirtReceiveArguments,
    NodeOptions,
    OnDefineDomainArguments,
    PodFitArguments,
)
from homenode.cli.terminal import (
    console,
    exit_if_bad,
    note,
    print_findings,
    write_new_files,
)
from homenode.cluster.kubevirt.object import read_manifest
from homenode.cluster.pods.checkpoints import FILES, read_checkpoints, running_pods
from homenode.cluster.pods.fit import Fit, fit_findings
from homenode.cluster.pods.kubelet import Kubelet, read_kubelet, usual_kubelet
from homenode.cluster.pods.machine import node_of_host, with_known_memory
from homenode.cluster.pods.pod import Pod, read_pod
from homenode.cluster.pods.pool_fit import pool_fit, pool_fit_findings
from homenode.cluster.scheduler.claims import claimed
from homenode.errors import HomenodeError, UsageError
from homenode.input_files import package_text, read_input
from homenode.measure.results.received import receive_run
from homenode.show.fit_text import fit_text, pool_fit_text
from homenode.vm.fingerprint import host_fingerprint
from homenode.vm.host_sources import read_hosts
from homenode.vm.sources import load_host

if TYPE_CHECKING:
    from homenode.cluster.pods.node import Node
    from homenode.findings import Findings
    from homenode.gap import Gap
    from homenode.machine.topology import Host, PagePool


def pod_fit(asked: PodFitArguments) -> None:
    """Print whether the pod is admitted."""
    document = read_manifest(read_input(asked.pod, "a Pod"), str(asked.pod), "a Pod")
    pod = read_pod(document, str(asked.pod))
    if asked.claims is not None and asked.node.host is not None:
        content = read_input(asked.claims, "claims and slices")
        machine = load_host(asked.node.host)
        pod = replace(pod, claimed=claimed(document, content, str(asked.claims), machine))
    answer_fit(pod, asked.node, asked.json)


def answer_fit(pod: Pod, node: NodeOptions, json: bool) -> None:
    """Print the answer; exit with 1 where the pod is refused or not aligned."""
    if (node.host is None) == (not node.pool):
        raise UsageError(
            "expected one of --host and --pool, found " + ("none" if node.host is None else "both")
        )
    named = named_devices(node.device)
    if node.pool:
        _answer_pool(pod, node, named, json)
        return

    machine = load_host(node.host)
    found = _fit_on(pod, machine, node.kubelet, node.state, named)
    _print(fit_findings(found, machine.name), lambda: console().print(fit_text(found)), json)


def _answer_pool(
    pod: Pod, node: NodeOptions, named: dict[str, tuple[Bdf, ...]], json: bool
) -> None:
    pool = read_hosts(node.pool)
    for unread in pool.unread:
        note(str(unread))
    fits: list[tuple[str, Fit]] = []
    answered: dict[tuple[object, ...], Fit] = {}
    for one in pool.hosts:
        memory = tuple((n.memory_bytes, tuple(map(_pages, n.page_pools))) for n in one.host.nodes)
        try:
            config = of_node(node.kubelet, f"{one.name}.json")
            running = of_node(node.state, one.name)
            key = host_fingerprint(one.host), memory, config, running
            if key not in answered:
                answered[key] = _fit_on(pod, one.host, config, running, named)
        except HomenodeError as error:
            note(f"left out {one.name}: {error.message}")
        else:
            fits.append((one.name, answered[key]))
    found = pool_fit(tuple(fits))
    findings = pool_fit_findings(found)
    if not json:  # the table has what was checked
        findings = replace(findings, checked=findings.checked[:1])
    _print(findings, lambda: console().print(pool_fit_text(found)), json)


def _pages(pool: "PagePool") -> tuple[int, int]:
    return pool.page_bytes, pool.total_pages


def of_node(given: Path | None, name: str) -> Path | None:
    """What a folder has of one node; a file is for all of them."""
    if given is None or not given.is_dir():
        return given
    if "/" in name or "\0" in name or name in ("", ".", ".."):
        raise UsageError(f"{given}: expected a host whose name can be a file's, found {name!r}")
    own = given / name
    if not own.exists():
        raise UsageError(f"{given}: expected {name} there, found nothing of that name")
    return own


def kubelet_of(machine: "Host", given: Path | None) -> Kubelet:
    """The kubelet of a file, else one that aligns."""
    if given is None:
        return usual_kubelet(machine)
    return read_kubelet(read_input(given, "a KubeletConfiguration"), str(given))


def _fit_on(
    pod: Pod,
    machine: "Host",
    kubelet: Path | None,
    state: Path | None,
    named: dict[str, tuple[Bdf, ...]],
) -> Fit:
    from homenode.cluster.pods.fit import fit, with_moves

    config = kubelet_of(machine, kubelet)
    texts: dict[str, str] = {}
    if state is not None:
        if not state.is_dir():
            raise UsageError(f"{state}: expected a folder with the kubelet's checkpoints")
        for name in FILES:
            if (state / name).is_file():
                content = read_input(state / name, "a checkpoint of the kubelet")
                texts[name] = content.decode("utf-8", "replace")
        if not texts:
            raise UsageError(f"{state}: expected {', '.join(FILES)} there, found none of them")
    pod, unknown = with_known_memory(pod, machine)

    def node_without(moved: frozenset[str]) -> "tuple[Node, tuple[Gap, ...]]":
        running = read_checkpoints(texts, str(state), moved)
        return node_of_host(machine, config, pod.devices, named, running)

    node, gaps = node_without(frozenset())
    found = fit(pod, node, (*unknown, *gaps))
    return with_moves(found, running_pods(texts, str(state)), lambda gone: node_without(gone)[0])


def _print(findings: "Findings", show_table: Callable[[], None], json: bool) -> None:
    print_findings(findings, as_json=json, before=show_table)
    exit_if_bad(findings.findings)


def named_devices(texts: tuple[str, ...]) -> dict[str, tuple[Bdf, ...]]:
    """The devices of --device, by resource."""
    found: dict[str, tuple[Bdf, ...]] = {}
    for text in texts:
        resource, is_one, listed = text.partition("=")
        if not is_one or not resource:
            raise UsageError(f"--device: expected RESOURCE=BDF,BDF, found {text[:60]!r}")
        found[resource] = tuple(Bdf.parse(one, "--device") for one in listed.split(","))
    return found


def on_define_domain(asked: OnDefineDomainArguments) -> None:
    """Print the new document, as the shim wants it."""
    from homenode.cli.on_define_domain import ask, write

    raise SystemExit(
        write(ask(asked.vmi, asked.domain, asked.on_error, asked.pci_granularity, asked.root))
    )


def receive(asked: KubevirtReceiveArguments) -> None:
    """Store the run."""
    import sys

    note(f"wrote {receive_run(sys.stdin.buffer, asked.results, asked.name)}")


def check(asked: KubevirtCheckArguments) -> None:
    """Print what does not fit together."""
    from homenode.cluster.kubevirt.admission_rules import read_cluster
    from homenode.cluster.kubevirt.fit import check_fit
    from homenode.cluster.kubevirt.vmi import Vmi, vmi_of

    what = "a VirtualMachineInstance"

    def read(path: Path) -> Vmi:
        document = read_manifest(read_input(path, what), str(path), what)
        return vmi_of(document, str(path), needs_domain=True)

    config = (
        None
        if asked.kubelet is None
        else read_kubelet(read_input(asked.kubelet, "a KubeletConfiguration"), str(asked.kubelet))
    )
    cluster = (
        None
        if asked.kubevirt is None
        else read_cluster(read_input(asked.kubevirt, "a KubeVirt CR as JSON"), str(asked.kubevirt))
    )
    findings = check_fit(
        read(asked.vmi),
        config,
        None if asked.host is None else load_host(asked.host),
        cluster,
        None if asked.planned is None else read(asked.planned),
    )
    print_findings(findings, as_json=asked.json)
    exit_if_bad(findings.findings)


def fit(asked: KubevirtFitArguments) -> None:
    """Print whether the VM's pod is admitted."""
    from homenode.cluster.kubevirt.vmi import launcher_pod, vmi_of

    what = "a VirtualMachineInstance"
    document = read_manifest(read_input(asked.vmi, what), str(asked.vmi), what)
    pod = launcher_pod(vmi_of(document, str(asked.vmi), needs_domain=True))
    answer_fit(pod, asked.node, asked.json)


def manifest(asked: KubevirtManifestArguments) -> None:
    """Write the manifests."""
    from homenode.cluster.kubevirt.hook_file import hook_file
    from homenode.cluster.kubevirt.manifests import manifests, next_steps

    options = asked.manifest
    written = manifests(options, hook_file(_own_source, __version__))
    written |= {"requirements.lock": package_text("cluster", "kubevirt", "requirements.lock")}
    write_new_files(asked.output, {asked.output / name: text for name, text in written.items()})
    for step in next_steps(options, str(asked.output)):
        note(step)


def _own_source(name: str) -> str | None:
    """The text of one of the package's modules; None where it has none of that name."""
    top, *rest = name.split(".")
    if top != "homenode":
        return None

    for path in ((*rest, "__init__.py"), (*rest[:-1], "".join((*rest[-1:], ".py")))):
        with contextlib.suppress(OSError):
            return package_text(*path)
    return None
