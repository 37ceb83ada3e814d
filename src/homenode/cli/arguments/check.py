"""What is asked of verify and doctor. [I/O]"""

from pathlib import Path
from typing import Annotated

from msgspec import Struct

from homenode.bdf import Bdf
from homenode.cli.arguments import ForceOption, HostOption, JsonOption, LspciOption
from homenode.opt import Arg, Flag, Opt

BOOT = "Test guest"


class VerifyArguments(Struct, frozen=True, kw_only=True):
    """Check a VM: its file, the VM as it starts, what its guest sees.

    Examples:
      homenode verify tuned.xml --plan plan.json --boot
      homenode verify gpu-vm --start
    """

    document: Annotated[Path | None, Arg("[VM]")] = None
    plan: Annotated[Path | None, Opt("--plan", "PLAN.json")] = None
    host: HostOption = None
    lspci: LspciOption = None
    boot: Annotated[bool, Flag("--boot", panel=BOOT)] = False
    start: Annotated[bool, Flag("--start")] = False
    yes: Annotated[bool, Flag("--yes -y", rare=True)] = False
    guest: Annotated[str | None, Opt("--guest", "SOURCE")] = None
    target: Annotated[str | None, Opt("--target", "NAME", rare=True)] = None
    live: Annotated[str | None, Opt("--live", "NAME", complete="domain_names")] = None
    connect: Annotated[str | None, Opt("--connect -c", "URI", rare=True)] = None
    kernel: Annotated[Path | None, Opt("--kernel", "FILE", panel=BOOT, rare=True)] = None
    timeout: Annotated[float | None, Opt("--timeout", "SECONDS", ge=1, panel=BOOT, rare=True)] = (
        None
    )
    keep: Annotated[Path | None, Opt("--keep", "DIR", panel=BOOT, rare=True)] = None
    svg: Annotated[Path | None, Opt("--svg", "FILE")] = None
    prometheus: Annotated[bool, Flag("--prometheus", rare=True)] = False
    json: JsonOption = False


FleetOption = Annotated[tuple[str, ...], Opt("--pool", "POOL")]


class DoctorArguments(Struct, frozen=True, kw_only=True):
    """Find slow links, bad settings and costly pins, each with its fix.

    Nothing is changed. The exit code is 1 where something is critical or a warning.

    Examples:
      homenode doctor VM.xml numactl.txt
      homenode doctor --pool captures/
    """

    files: Annotated[tuple[str, ...], Arg("FILE...", complete="domain_names")] = ()
    host: HostOption = None
    lspci: LspciOption = None
    live: Annotated[str | None, Opt("--live", "NAME", complete="domain_names")] = None
    h2d: Annotated[tuple[str, ...], Opt("--h2d", "[BDF=]GB/S")] = ()
    known_width: Annotated[tuple[str, ...], Opt("--known-width", "BDF=LANES", rare=True)] = ()
    under_load: Annotated[bool, Flag("--under-load")] = False
    load_command: Annotated[str | None, Opt("--load-command", "COMMAND", rare=True)] = None
    expect: Annotated[str | None, Opt("--expect", "FILE")] = None
    fix: Annotated[Path | None, Opt("--fix", "FILE")] = None
    everything: Annotated[bool, Flag("--all")] = False
    prometheus: Annotated[bool, Flag("--prometheus", rare=True)] = False
    pool: FleetOption = ()
    force: ForceOption = False
    json: JsonOption = False


class RetrainArguments(Struct, frozen=True, kw_only=True):
    """Train the link above a device again, at the fastest speed that both of its ends can.

    Without --apply it shows the registers that it would write. It refuses while a VM or a driver
    uses anything behind the port.

    Examples:
      homenode doctor retrain 41:00.0
      homenode doctor retrain 41:00.0 --apply
    """

    devices: Annotated[tuple[Bdf, ...], Arg("BDF...", parse=Bdf.parse)] = ()
    target: Annotated[int | None, Opt("--target", "GEN")] = None
    apply: Annotated[bool, Flag("--apply")] = False
    print_unit: Annotated[bool, Flag("--print-unit")] = False
    print_hook: Annotated[bool, Flag("--print-hook")] = False
    json: JsonOption = False


class RetrainHookArguments(Struct, frozen=True, kw_only=True):
    """What the libvirt hook of `retrain --print-hook` calls; the domain's XML is its input."""

    words: Annotated[tuple[str, ...], Arg("DOMAIN OPERATION")] = ()
    target: Annotated[int | None, Opt("--target", "GEN")] = None
