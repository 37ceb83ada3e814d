"""The demonstration behind `make demo`: this machine captured, two hosts planned, a report made.

Everything is what the commands do; each step prints the command that does the same. Takes the
directory to write into as its only argument.
"""

import os
import shutil
import sys
import time
from collections.abc import Mapping
from pathlib import Path

from rich.console import Console

from homenode.doc import Doc, Table, Text
from homenode.errors import HomenodeError
from homenode.machine.description.parse import load_shipped
from homenode.machine.pci import DeviceKind
from homenode.machine.snapshot.capture import capture_host
from homenode.machine.topology import Host
from homenode.plan.pipeline import plan_file
from homenode.plan.stored import encode_plan
from homenode.show.explain import explain
from homenode.show.host_groups import format_host_counts
from homenode.show.html import render_page
from homenode.show.plan_text import format_refusal
from homenode.show.report.answer import answer_text
from homenode.show.report.document import build_report
from homenode.show.report.inputs import gather
from homenode.show.report.machine import build_machines
from homenode.show.terminal_text import PrintableConsole
from homenode.show.topology_map import draw_topology
from homenode.text import number_list, plural
from homenode.vm.domain.restore import write_tuned
from homenode.vm.domain.schema import validate
from homenode.vm.layout import PRESETS, MemoryBinding
from homenode.vm.plan import Plan, Unplannable
from homenode.vm.plan_options import PlanOptions
from homenode.vm.sources import load_host

DOCUMENT = Path("demo") / "gpu-vm.xml"
MACHINES = (
    # The study's guest: seven GPUs of an NVSwitch board, which are no partition of its fabric.
    ("h200-xeon8558", 7, ("--allow-no-nvlink",)),
    ("hgx-h100", 8, ()),
)
DRAWN = "pin-numa-pci"
PUBLISHED, REPORT = "demo/published", "published.html"


def main(out: Path) -> int:
    started = time.monotonic()
    os.chdir(Path(__file__).parent.parent)  # the commands that are printed can be copied
    console = PrintableConsole(highlight=False)
    out.mkdir(parents=True, exist_ok=True)
    _capture(console, out)
    failures = sum(_plan_machine(console, out, *machine) for machine in MACHINES)
    _report(console, out)
    console.print(f"\nDone in {time.monotonic() - started:.1f} s. Where to look:")
    found = [
        (out / REPORT, "which layout the published figures support, and why: open in a browser"),
        (out / "this-machine.svg", "this machine"),
    ]
    for name, _, _ in MACHINES:
        drawn = out / name / DRAWN
        found += [
            (drawn.with_suffix(".svg"), "the host with its VM"),
            (drawn.with_suffix(".txt"), "why there, in words"),
            (drawn.with_suffix(".xml"), f"a tuned domain; compare with {DOCUMENT}"),
        ]
    for path, what in found:
        if path.exists():
            console.print(f"  {path}  {what}", soft_wrap=True)
    return 1 if failures else 0


def _report(console: Console, out: Path) -> None:
    console.print()
    console.rule("What others have measured", align="left")
    console.print(f"$ homenode report {PUBLISHED} -o {out / REPORT}", style="bold")
    found = gather([PUBLISHED], ())
    machines = build_machines(found.runs, found.stored, found.hosts)
    page = render_page(build_report(machines, found.skipped, "made by make demo"))
    (out / REPORT).write_text(page, encoding="utf-8")
    console.print(answer_text(machines))


def _capture(console: Console, out: Path) -> None:
    archive = out / "this-machine.tar.gz"
    console.rule("This machine", align="left")
    console.print(
        f"$ homenode capture -o {archive}; homenode show --host {archive}",
        style="bold",
        soft_wrap=True,
    )
    try:
        archive.write_bytes(capture_host().content)
        host = load_host(str(archive))
    except HomenodeError as error:  # a container without /sys, say: the rest needs nothing of it
        console.print(f"{error.message}: this machine is omitted")
        return
    counts = f"{format_host_counts(host)}; {plural(len(host.gaps), 'thing')} not known"
    console.print(counts, soft_wrap=True)
    (out / "this-machine.svg").write_text(draw_topology(host), encoding="utf-8")


def _plan_machine(
    console: Console, out: Path, name: str, gpus: int, options: tuple[str, ...]
) -> int:
    """Plan every preset on one machine; returns how many were refused or failed the schema."""
    directory = out / name
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True)
    host = load_host(name)
    console.print()
    console.rule(name, align="left")
    console.print(load_shipped(name).about, soft_wrap=True)
    console.print(
        f"$ homenode plan {DOCUMENT} --host {name} --gpus {gpus} "
        + "".join(f"{option} " for option in options)
        + "--layout PRESET "
        f"-o {directory}/PRESET.xml",
        style="bold",
        soft_wrap=True,
    )
    original = DOCUMENT.read_bytes()
    plans: dict[str, Plan | Unplannable] = {}
    failed = 0
    gap = None
    without_nvlink = "--allow-no-nvlink" in options
    for preset in PRESETS:
        try:
            asked = PlanOptions(preset, gpu_count=gpus, without_nvlink=without_nvlink)
            tuning = plan_file(original, DOCUMENT.name, asked, host)
        except Unplannable as refusal:
            plans[preset] = refusal
            failed += 1
            _explain(directory / f"{preset}.txt", format_refusal(refusal))
            continue
        plans[preset] = tuning.plan
        errors, gap = validate(tuning.document)
        failed += bool(errors)
        write_tuned(directory / f"{preset}.xml", original, tuning.document)
        (directory / f"{preset}.json").write_text(encode_plan(tuning.plan), encoding="utf-8")
        _explain(directory / f"{preset}.txt", explain(tuning.plan, host))
    _draw(directory, host, plans)
    console.print(plan_table(plans, host))
    if gap is not None:
        console.print(f"not checked against libvirt's schema: {gap}", style="dim")
    elif not failed:
        console.print("every tuned document passes the installed libvirt's schema", style="dim")
    return failed


def _draw(directory: Path, host: Host, plans: dict[str, Plan | Unplannable]) -> None:
    drawn = plans[DRAWN]
    picture = draw_topology(host, drawn if isinstance(drawn, Plan) else None)
    (directory / f"{DRAWN}.svg").write_text(picture, encoding="utf-8")


def _explain(path: Path, text: object) -> None:
    with path.open("w", encoding="utf-8") as file:
        PrintableConsole(file=file, width=100, highlight=False).print(text)


COLUMNS = (
    "layout",
    "vCPUs",
    "nodes",
    "guest cells",
    "GPUs placed",
    "LLCs",
    "memory",
    "remote DMA",
)

_BINDINGS = {
    MemoryBinding.KEEP: "as it was",
    MemoryBinding.BOUND: "bound",
    MemoryBinding.BOUND_PER_CELL: "per cell",
}


def plan_table(plans: Mapping[str, Plan | Unplannable], host: Host | None) -> Doc:
    """The presets by name, with the plan of each or the reason that there is none.

    "GPUs placed": GPUs whose node the guest can know, of the VM's GPUs. "remote DMA": share of the
    guest's memory that is not on a GPU's own node, on average over the GPUs (other devices where
    the VM has no GPU); unknown where memory is not bound or a node is unknown.
    """
    rows = tuple(preset_row(name, plan, host) for name, plan in plans.items())
    refused = tuple(
        Text(f"{name}: unplannable: {plan.message}")
        for name, plan in plans.items()
        if isinstance(plan, Unplannable)
    )
    return Doc("", (Table(heads=COLUMNS, rows=rows, least=("LLCs", "nodes")), *refused))


def preset_row(name: str, plan: Plan | Unplannable, host: Host | None) -> tuple[str, ...]:
    """One line of the table, a text for each of COLUMNS."""
    if isinstance(plan, Unplannable):
        return (name, *("-",) * (len(COLUMNS) - 1))
    gpus = () if host is None else tuple(gpu.bdf for gpu in host.devices_of_kind(DeviceKind.GPU))
    devices = [d for d in plan.vm.hostdevs if d.bdf in gpus] or list(plan.vm.hostdevs)
    placed = sum(device.cell is not None for device in devices)
    ratios = [device.local_memory_ratio for device in devices]
    known = [ratio for ratio in ratios if ratio is not None]
    remote = "none" if not devices else "unknown"
    if devices and len(known) == len(devices):
        remote = f"{100 * (1 - sum(known) / len(known)):.0f} %"
    return (
        name,
        str(plan.vm.vcpus),
        number_list(plan.nodes) or "any",
        str(len(plan.cells)),
        f"{placed} of {len(devices)}" if devices else "none",
        str(len(plan.llcs)) if plan.vcpu_pins else "any",
        _BINDINGS[plan.layout.memory],
        remote,
    )


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
