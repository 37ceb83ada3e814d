"""homenode show, capture, host-setup, list: hosts looked at, kept, set up; what is known. [I/O]"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from homenode.catalogue import catalogue
from homenode.cli.arguments.conclude import FindingsArguments, HostsArguments, LayoutsArguments
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
from homenode.doc import Doc, Table
from homenode.errors import InputError, UsageError
from homenode.formats import encode
from homenode.input_files import read_input
from homenode.machine.description.shipped import is_made_up, load_shipped, shipped_hosts
from homenode.machine.topology import Host, summarise
from homenode.units import format_bytes
from homenode.vm.layout import AUTO_SUMMARY, PRESETS, STUDY_NAMES, SUMMARIES, Layout
from homenode.vm.sources import load_host
from homenode.wording import did_you_mean

if TYPE_CHECKING:
    from homenode.change.host_setup.files import HostNeeds, Isolation, SetupFile
    from homenode.change.host_setup.installation import FileChange


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
    from homenode.change.host_setup.check import read_running, unmet
    from homenode.change.host_setup.files import HOOK, Isolation, setup_files
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
    from homenode.change.host_setup.files import needs_of
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


def layouts(asked: LayoutsArguments) -> None:
    """Print each layout with its switches."""
    if asked.json:
        _print_rows([_layout_row(preset) for preset in PRESETS.values()])
        return
    say("auto: what the evidence recommends for the VM (the default)\n")
    for name, summary in SUMMARIES.items():
        also = ", ".join(_study_names(name))
        say(f"{name}: {summary}" + (f" (study: {also})" if also else ""))
    rows = tuple(
        (
            preset.name,
            preset.pinning.replace("-", " ").replace("pu", "PU"),
            *(
                "-" if switch in ("as-it-was", "as-they-were") else switch.replace("bound-", "")
                for switch in (preset.siblings, preset.cells, preset.pcie, preset.memory)
            ),
        )
        for preset in PRESETS.values()
    )
    say("")
    columns = ("layout", "pinning", "siblings", "cells", "PCIe", "memory")
    console().print(Doc("", (Table(heads=columns, rows=rows),)))
    say("-: as the domain has it; per-cell: each guest cell's memory on its own host node")
    say("-smt layouts double the vCPUs on the same cores; --keep-vcpus halves the cores.")


def _layout_row(preset: Layout) -> dict[str, object]:
    return {
        "name": preset.name,
        "about": SUMMARIES.get(preset.name, AUTO_SUMMARY),
        "study_names": _study_names(preset.name),
        "pinning": preset.pinning,
        "siblings": preset.siblings,
        "cells": preset.cells,
        "pcie": preset.pcie,
        "memory": preset.memory,
    }


def _study_names(name: str) -> list[str]:
    return [study for study, preset in STUDY_NAMES.items() if preset == name]


def hosts(asked: HostsArguments) -> None:
    """Print the names of shipped hosts, and what each is."""
    named = shipped_hosts()
    shown = [name for name in named if asked.everything or not is_made_up(name)]
    rows = tuple((name, load_shipped(name).about) for name in shown)
    if asked.json:
        _print_rows([{"name": name, "about": about} for name, about in rows])
        return
    heads = ("name", "what it is")
    console().print(Doc("", (Table(heads=heads, rows=rows, folds=heads[-1:]),)))
    if len(shown) < len(named):
        note(f"{len(named) - len(shown)} made-up ones, each with one unusual property: --all")


def findings(asked: FindingsArguments) -> None:
    """Print the page of a finding, or the ids of all."""
    known = catalogue()
    if asked.finding is None:
        if asked.json:
            _print_rows([{"id": name, "text": known[name].text} for name in sorted(known)])
        else:
            say("\n".join(sorted(known)))
        return
    if asked.finding not in known:
        raise InputError(
            f"{asked.finding}: expected the id of a finding, found none of that name",
            hint=f"{did_you_mean(asked.finding, known)}each finding ends with its id in brackets",
        )
    text = known[asked.finding].text
    if asked.json:
        _print_rows([{"id": asked.finding, "text": text}])
    elif console().is_terminal:
        from rich.markdown import Markdown

        console().print(Markdown(text))
    else:
        say(text.rstrip())


def _print_rows(rows: list[dict[str, object]]) -> None:
    print_json(json.dumps(rows, indent=1, ensure_ascii=False) + "\n")
