"""homenode kubevirt: the hook, checks, manifests, and runs received from guests. [I/O]"""

import gc
import os
import shlex
import sys

from homenode.cli.terminal import exit_by, note, print_bytes, print_findings, write_new_files
from homenode.cluster.arguments import (
    KubevirtCheckArguments,
    KubevirtManifestArguments,
    KubevirtReceiveArguments,
    OnDefineDomainArguments,
)
from homenode.errors import InputError, ParseError, UsageError
from homenode.findings import add_gaps
from homenode.measure.results.store import receive_run
from homenode.safe.input_files import read_input, read_subject
from homenode.vm.sources import load_host


def on_define_domain(arguments: OnDefineDomainArguments) -> None:
    """Print the new definition for the shim, and notes for the pod's log. The container has 0.2
    CPUs and 64 MiB while a VM waits, so only the needed modules are imported."""
    from homenode.cluster.kubevirt.placing import answer
    from homenode.machine.snapshot.store import DirectorySnapshot

    for option, text, first, kind in (
        ("--vmi", arguments.vmi, "{", "JSON"),
        ("--domain", arguments.domain, "<", "XML"),
    ):
        if not text.lstrip().startswith(first):
            raise UsageError(
                f"{option}: expected {kind}, found {text[:60]!r}", hint=f'{option} "$(cat FILE)"'
            )
    root = arguments.root
    gc.disable()  # the process ends before there is anything to collect
    result = answer(
        arguments.vmi,
        os.fsencode(arguments.domain),
        lambda: DirectorySnapshot(root if root != "/" else "this machine", root),
        on_error=arguments.on_error,
        granularity=arguments.pci_granularity,
    )
    for text in result.notes:
        for line in text.split("\n  hint: "):
            note(f"onDefineDomain: {line[:4000]}")
    if result.document is not None:
        print_bytes(result.document)
    raise SystemExit(result.exit_code)


def receive(arguments: KubevirtReceiveArguments) -> None:
    note(f"wrote {receive_run(sys.stdin.buffer, arguments.results, arguments.name)}")


def check(arguments: KubevirtCheckArguments) -> None:
    from homenode.cluster.kubevirt.check import check as judge
    from homenode.cluster.kubevirt.object import read_cluster, read_manifest
    from homenode.cluster.kubevirt.vmi import build_vmi

    kind, name = "a VirtualMachineInstance", str(arguments.vmi)
    stem = arguments.vmi.stem
    vm = "NAME" if stem in ("vm", "vmi") else shlex.quote(stem)
    hint = f"kubectl get vm {vm} -o yaml > {shlex.quote(name)}"
    document = read_manifest(read_subject(arguments.vmi, kind, hint=hint), name, kind)
    cluster = None
    if arguments.kubevirt is not None:
        hint = "kubectl get kubevirt -A -o yaml > kubevirt.yaml"
        content = read_input(arguments.kubevirt, "a KubeVirt object", hint=hint)
        cluster = read_cluster(content, str(arguments.kubevirt))
    host = None if arguments.host is None else load_host(arguments.host)
    vmi = build_vmi(document, name, needs_domain=True)
    try:
        judged = judge(vmi, host, cluster)
    except ParseError as error:
        raise InputError(f"{name}: {error.message}") from None
    findings = add_gaps(judged, () if host is None else host.gaps)
    noun = "VM" if document.get("kind") == "VirtualMachine" else "VMI"
    subject = f"{noun} {vmi.name}"
    print_findings(findings, subject, as_json=arguments.json, explain=arguments.explain)
    exit_by(findings)


def manifest(arguments: KubevirtManifestArguments) -> None:
    from homenode.cluster.kubevirt.manifests import (
        list_next_steps,
        list_untested_parts,
        render_manifests,
    )

    options = arguments.manifest
    manifests = render_manifests(options)
    write_new_files(
        arguments.output, {arguments.output / name: text for name, text in manifests.items()}
    )
    for warning in list_untested_parts(options):
        note(f"warning: {warning}")
    for name, step in list_next_steps(options, str(arguments.output)):
        note(f"{name:8}{step}", hang=8)
