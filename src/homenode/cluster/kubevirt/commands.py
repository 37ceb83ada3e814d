"""homenode kubevirt: the hook, checks, manifests, runs that guests send. [I/O]"""

from homenode.cli.terminal import exit_by, note, print_findings, write_new_files
from homenode.cluster.kubevirt.arguments import (
    KubevirtCheckArguments,
    KubevirtManifestArguments,
    KubevirtReceiveArguments,
    OnDefineDomainArguments,
)
from homenode.findings import with_gaps
from homenode.measure.results.received import receive_run
from homenode.safe.input_files import read_input, read_subject
from homenode.vm.sources import load_host


def on_define_domain(asked: OnDefineDomainArguments) -> None:
    """Print the new document, as the shim wants it."""
    from homenode.cluster.kubevirt.hook import ask, write

    raise SystemExit(
        write(ask(asked.vmi, asked.domain, asked.on_error, asked.pci_granularity, asked.root))
    )


def receive(asked: KubevirtReceiveArguments) -> None:
    """Store the run."""
    import sys

    note(f"wrote {receive_run(sys.stdin.buffer, asked.results, asked.name)}")


def check(asked: KubevirtCheckArguments) -> None:
    """Print what does not go together."""
    from homenode.cluster.kubevirt.check import check as judge
    from homenode.cluster.kubevirt.check import read_gates
    from homenode.cluster.kubevirt.object import read_manifest
    from homenode.cluster.kubevirt.vmi import vmi_of

    what, name = "a VirtualMachineInstance", str(asked.vmi)
    document = read_manifest(read_subject(asked.vmi, what), name, what)
    gates = None
    if asked.kubevirt is not None:
        content = read_input(asked.kubevirt, "a KubeVirt CR as JSON")
        gates = read_gates(content, str(asked.kubevirt))
    host = None if asked.host is None else load_host(asked.host)
    findings = judge(vmi_of(document, name, needs_domain=True), host, gates)
    findings = with_gaps(findings, () if host is None else host.gaps)
    print_findings(findings, as_json=asked.json)
    exit_by(findings)


def manifest(asked: KubevirtManifestArguments) -> None:
    """Write the manifests."""
    from homenode.cluster.kubevirt.manifests import manifests, next_steps

    options = asked.manifest
    written = manifests(options)
    write_new_files(asked.output, {asked.output / name: text for name, text in written.items()})
    for step in next_steps(options, str(asked.output)):
        note(step)
