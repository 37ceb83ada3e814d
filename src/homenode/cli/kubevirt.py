"""homenode kubevirt: the hook, what must fit around it, and its manifests. [I/O]"""

import contextlib

from homenode.cli.arguments.cluster import (
    KubevirtCheckArguments,
    KubevirtFitArguments,
    KubevirtManifestArguments,
    KubevirtReceiveArguments,
    OnDefineDomainArguments,
)
from homenode.cli.pod import answer_fit
from homenode.cli.terminal import (
    check_can_write,
    exit_if_bad,
    note,
    print_findings,
    write_text,
)
from homenode.errors import HostError, UsageError
from homenode.input_files import read_input


def on_define_domain(asked: OnDefineDomainArguments) -> None:
    """Print the new document, as the shim wants it."""
    from homenode.cli.on_define_domain import ask, write

    raise SystemExit(
        write(ask(asked.vmi, asked.domain, asked.on_error, asked.pci_granularity, asked.root))
    )


def receive(asked: KubevirtReceiveArguments) -> None:
    """Store the run."""
    import sys

    from homenode.measure.results.received import receive_run

    note(f"wrote {receive_run(sys.stdin.buffer, asked.results, asked.name)}")


def check(asked: KubevirtCheckArguments) -> None:
    """Print what does not fit together."""
    from homenode.cluster.kubevirt.cluster import read_cluster
    from homenode.cluster.kubevirt.fit import check_fit
    from homenode.cluster.kubevirt.vmi import vmi_of
    from homenode.cluster.pods.kubelet import read_kubelet
    from homenode.cluster.pods.manifest import read_manifest
    from homenode.vm.sources import load_host

    what = "a VirtualMachineInstance"
    read = vmi_of(
        read_manifest(read_input(asked.vmi, what), str(asked.vmi), what),
        str(asked.vmi),
        needs_domain=True,
    )
    config = (
        None
        if asked.kubelet is None
        else read_kubelet(
            read_input(asked.kubelet, "a KubeletConfiguration as JSON"), str(asked.kubelet)
        )
    )
    cluster = (
        None
        if asked.kubevirt is None
        else read_cluster(read_input(asked.kubevirt, "a KubeVirt CR as JSON"), str(asked.kubevirt))
    )
    findings = check_fit(
        read, config, None if asked.host is None else load_host(asked.host), cluster
    )
    print_findings(findings, as_json=asked.json)
    exit_if_bad(findings.findings)


def fit(asked: KubevirtFitArguments) -> None:
    """Print whether the VM's pod is admitted."""
    from homenode.cluster.kubevirt.vmi import launcher_pod, vmi_of
    from homenode.cluster.pods.manifest import read_manifest

    what = "a VirtualMachineInstance"
    document = read_manifest(read_input(asked.vmi, what), str(asked.vmi), what)
    pod = launcher_pod(vmi_of(document, str(asked.vmi), needs_domain=True))
    answer_fit(pod, asked.node, asked.json)


def manifest(asked: KubevirtManifestArguments) -> None:
    """Write the manifests."""
    from homenode import __version__
    from homenode.cluster.kubevirt.hook_file import hook_file
    from homenode.cluster.kubevirt.manifests import manifests, next_steps
    from homenode.package_files import package_text

    options = asked.manifest
    written = manifests(options, hook_file(_own_source, __version__))
    written |= {"requirements.lock": package_text("cluster", "kubevirt", "requirements.lock")}
    if asked.output.exists() and not asked.output.is_dir():
        raise UsageError(f"{asked.output}: expected a folder, found a file")
    try:
        asked.output.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise HostError(
            f"{asked.output}: expected to make a folder, found: {error.strerror}"
        ) from None
    paths = {asked.output / name: text for name, text in written.items()}
    there = [path for path in paths if path.exists()]
    if there:
        raise UsageError(
            f"{there[0]}: expected nothing there yet, found a file",
            hint="name another folder; what you have edited is not overwritten",
        )
    check_can_write(*paths)
    for path, text in paths.items():
        write_text(path, text)
        note(f"wrote {path}")
    for step in next_steps(options):
        note(step)


def _own_source(name: str) -> str | None:
    """The text of one of the package's modules; None where it has none of that name."""
    top, *rest = name.split(".")
    if top != "homenode":
        return None
    from homenode.package_files import package_text

    for path in ((*rest, "__init__.py"), (*rest[:-1], "".join((*rest[-1:], ".py")))):
        with contextlib.suppress(OSError):
            return package_text(*path)
    return None
