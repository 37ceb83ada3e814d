"""homenode show, capture and host-setup: a host looked at, kept, and set up for VMs. [I/O]"""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from homenode.cli.arguments.place import (
    CaptureArguments,
    HostSetupCheckArguments,
    HostSetupInstallArguments,
    HostSetupShowArguments,
    HostSetupUndoArguments,
    ShowArguments,
)
from homenode.cli.terminal import (
    STANDARD_OUTPUT,
    check_can_write,
    console,
    exit_if_bad,
    note,
    note_written,
    print_findings,
    print_json,
    say,
    working,
    write_text,
)
from homenode.errors import UsageError
from homenode.formats import encode
from homenode.input_files import read_input
from homenode.machine.topology import Host, summarise
from homenode.units import format_bytes
from homenode.vm.sources import load_host

if TYPE_CHECKING:
    from homenode.change.host_setup.files import Isolation, SetupFile
    from homenode.change.host_setup.installation import FileChange
    from homenode.change.host_setup.needs import HostNeeds


def show(asked: ShowArguments) -> None:
    """Print the host, or draw it."""
    if asked.plan is not None and asked.svg is None:
        raise UsageError("--plan: expected --svg as well, found none")
    if asked.json and asked.svg == STANDARD_OUTPUT:
        raise UsageError("give either --json or --svg -, not both")
    check_can_write(asked.svg, force=asked.force)
    host = load_host(asked.host, lspci=asked.lspci)
    if asked.svg is not None:
        write_text(asked.svg, _drawn(host, asked))
        note_written(asked.svg)
    if asked.json:
        print_json(encode("host", host, {"summary": summarise(host)}))
    elif asked.svg is None:
        from homenode.show.host_tree import host_tree

        console().print(host_tree(host, asked.everything))


def _drawn(host: Host, asked: ShowArguments) -> str:
    from homenode.plan.stored import read_plan_for
    from homenode.show.topology_map import topology_map

    if asked.plan is None:
        return topology_map(host, None)
    saved = read_input(asked.plan, "a saved plan")
    return topology_map(host, read_plan_for(host, saved, str(asked.plan)))


def capture(asked: CaptureArguments) -> None:
    """Write the snapshot, and say what is in it."""
    from homenode.machine.snapshot.capture import capture_host

    with working(f"reading {asked.ssh or 'this machine'}"):
        captured = capture_host(
            asked.output, asked.ssh, redacted=not asked.no_redact, overwrite=asked.force
        )
    manifest = captured.manifest
    note(
        f"wrote {captured.path} ({format_bytes(captured.size_bytes)}): {manifest.files} files, "
        f"{manifest.links} links, tools: {', '.join(manifest.commands) or 'none'}"
    )
    for path, reason in manifest.left_out:
        note(f"  left out {path}: {reason}")
    note(
        "redacted: serials, UUIDs, MACs, addresses, host, user and domain names"
        if manifest.redacted
        else "NOT redacted: do not publish it"
    )
    for what in manifest.not_everywhere:
        note(
            f"the {what} is a short or common word and may remain in some files: check the archive "
            "before you publish it"
        )


def show_setup(asked: HostSetupShowArguments) -> None:
    """Print the files."""
    for file in _files(asked.plans, asked.host, asked.isolate):
        say(f"==> {file.path}\n{file.text}")
        note(f"then: {file.activate}")


def install_setup(asked: HostSetupInstallArguments) -> None:
    """Put the files in place."""
    from homenode.change.host_setup.installation import Installation
    from homenode.change.journal import default_root
    from homenode.cli.restore import changing_host
    from homenode.vm.hypervisor.connection import DEFAULT

    files = _files(asked.plans, None, asked.isolate)
    installation = Installation(default_root())
    with changing_host("host-setup", ("install",), DEFAULT, dry_run=asked.dry_run):
        changes = installation.preview(files) if asked.dry_run else installation.install(files)
    _say_changes(changes, "would " if asked.dry_run else "")
    if not asked.dry_run:
        changed = {one.path for one in changes if one.action in ("create", "replace")}
        for file in files:
            if file.path in changed:
                note(f"next: {file.activate}")
        note("undo: homenode host-setup undo")


def undo_setup(asked: HostSetupUndoArguments) -> None:
    """Remove them."""
    from homenode.change.host_setup.installation import Installation
    from homenode.change.journal import default_root

    changes = Installation(default_root()).undo()
    _say_changes(changes, "")
    if not changes:
        note("nothing is installed")


def check_setup(asked: HostSetupCheckArguments) -> None:
    """Compare the running host with what the plans need."""
    from homenode.change.host_setup.check import unmet
    from homenode.change.host_setup.files import HOOK, Isolation, setup_files
    from homenode.change.host_setup.running import read_running
    from homenode.findings import Findings

    needs, machine = _needs(asked.plans, asked.host)
    isolation = _isolation(asked.isolate)
    running = read_running() if asked.host is None else None
    hook = next((one for one in setup_files(needs, isolation) if one.path == HOOK), None)
    found = tuple(unmet(needs, machine, isolation, hook, running))
    checked = [
        f"{machine.name}: huge pages of {len(needs.pages)} pools",
        f"{machine.name}: PUs {needs.vm_pus or 'none'} of {len(needs.domains)} VMs",
    ]
    not_checked: list[str] = []
    if isolation is Isolation.BOOT:
        checked.append(f"{machine.name}: isolcpus and nohz_full of the kernel")
    if isolation is not Isolation.NONE and running is None:
        not_checked.append("the libvirt hook and irqbalance of another host: run it there")
    elif isolation is not Isolation.NONE and running is not None:
        not_checked += [str(gap) for gap in running.gaps]
        if hook is not None:
            checked.append(f"{HOOK}: text and permission")
        if running.irqbalance_bans is not None:
            checked.append("irqbalance, which runs: the PUs that it leaves alone")
        elif not running.gaps:
            checked.append("irqbalance: does not run as a service")
    findings = Findings(checked=tuple(checked), findings=found, not_checked=tuple(not_checked))
    print_findings(findings, as_json=asked.json)
    exit_if_bad(found)


def _files(plans: Sequence[Path], host: str | None, isolate: str) -> "tuple[SetupFile, ...]":
    from homenode.change.host_setup.files import setup_files

    isolation = _isolation(isolate)
    files = setup_files(_needs(plans, host)[0], isolation)
    if not files:
        note("these plans need nothing of the host: no huge pages, no pinned PUs")
    return files


def _needs(plans: Sequence[Path], host: str | None) -> "tuple[HostNeeds, Host]":
    from homenode.change.host_setup.needs import needs_of
    from homenode.plan.stored import read_plan_for
    from homenode.vm.sources import load_host

    machine = load_host(host)
    read = [
        (str(path), read_plan_for(machine, read_input(path, "a saved plan"), str(path)))
        for path in plans
    ]
    return needs_of(read, machine), machine


def _isolation(word: str) -> "Isolation":
    from homenode.change.host_setup.files import Isolation
    from homenode.errors import UsageError

    if word not in list(Isolation):
        raise UsageError(f"--isolate: expected one of {', '.join(Isolation)}, found {word!r}")
    return Isolation(word)


def _say_changes(changes: "Sequence[FileChange]", would: str) -> None:
    from homenode.change.host_setup.files import after_removal

    for change in changes:
        say(f"{would}{change.action} {change.path}")
    for change in changes:
        next_step = after_removal(change.path) if change.action == "remove" else None
        if next_step is not None and not would:
            note(f"next: {next_step}")
