"""Arguments of verify and doctor. [I/O]"""

from pathlib import Path
from typing import Annotated

from msgspec import Struct

from homenode.bdf import Bdf
from homenode.cli.arguments import HostOption, JsonOption, LspciOption
from homenode.option import Arg, Flag, Opt

BOOT = "Test guest"


class VerifyArguments(Struct, frozen=True, kw_only=True):
    """Check a VM: its file, its start, its guest's view.

    Options:
      document: The domain XML, a domain of this libvirt by name or UUID, or a target's file, which
        needs --plan; may be omitted with --guest and --plan.
      plan: The saved plan to compare with. Default: the definition itself.
      boot: Boot a test guest of the definition, and check what its kernel reports.
      start: Start the domain paused with its real devices, check it, and end it.
      yes: With --start: start the domain without a prompt.
      guest: Compare with the running guest's own view: ssh:HOST or ssh://USER@HOST:PORT, or any
        host source of show made inside it.
      explain: Print each finding and each compared fact separately, with its source. Default: equal
        findings in one line.
      target: For --guest with a plan alone: the hypervisor that the plan was made for, as plan
        --target has it. Default: libvirt.
      live: Check a running domain of this machine from outside (threads, memory, IRQs); see apply.
      connect: The libvirt connection; with --boot, none runs QEMU directly. Default:
        qemu:///system, and with --boot QEMU if libvirt does not answer.
      kernel: Kernel of the test guest, a file. Default: the first installed kernel.
      timeout: Time limit in seconds. Without KVM, if libvirt's guest has not booted after half of
        this time, QEMU is run directly. Default: 60, plus 5 for each vCPU.
      keep: Keep the console, the report, and the definition or command line in this directory.
      prometheus: Print Prometheus' text format.
      host: Host to compare with (sources: homenode show --help). With --live and --start, this host
        and the host of --plan must be the host of the libvirt daemon. Default: this machine;
        without it no host is compared if the plan or the definition is for another host.

    Examples:
      homenode verify tuned.xml --plan plan.json --boot
      homenode verify gpu-vm --start
    """

    document: Annotated[Path | None, Arg("[VM]", complete="vms")] = None
    plan: Annotated[Path | None, Opt("--plan", "PLAN.json")] = None
    host: HostOption = None
    lspci: LspciOption = None
    boot: Annotated[bool, Flag("--boot", panel=BOOT)] = False
    start: Annotated[bool, Flag("--start")] = False
    yes: Annotated[bool, Flag("--yes -y", rare=True)] = False
    guest: Annotated[str | None, Opt("--guest", "SOURCE")] = None
    explain: Annotated[bool, Flag("--explain")] = False
    target: Annotated[str | None, Opt("--target", "NAME", complete="targets", rare=True)] = None
    live: Annotated[str | None, Opt("--live", "NAME", complete="domain_names")] = None
    connect: Annotated[str | None, Opt("--connect -c", "URI", rare=True)] = None
    kernel: Annotated[Path | None, Opt("--kernel", "FILE", panel=BOOT, rare=True)] = None
    timeout: Annotated[float | None, Opt("--timeout", "SECONDS", ge=1, panel=BOOT, rare=True)] = (
        None
    )
    keep: Annotated[Path | None, Opt("--keep", "DIR", panel=BOOT, rare=True)] = None
    prometheus: Annotated[bool, Flag("--prometheus", rare=True)] = False
    json: JsonOption = False


class DoctorArguments(Struct, frozen=True, kw_only=True):
    """Find slow links, bad settings and costly pins, each with its fix.

    Nothing is changed. The exit code is 1 if a finding is critical or a warning.

    Options:
      files: Names of this machine's VMs, files of VMs and of the host, in any order; - for a VM on
        standard input. Default: only the host.
      h2d: Compare this measured host-to-device rate, of one GPU or of all; may be repeated.
      known_width: Accept this width of a slot that is wired narrower than its port; may be
        repeated.
      under_load: Read links while a copy runs: nvbandwidth, rocm-bandwidth-test, or homenode's own
        program in a python3 with PyTorch. Default: read idle links.
      load_command: The command that copies to the GPUs, with --under-load.
      expect: Compare the host with a record of it: a capture, a host.json or any other host source.
      explain: Print each finding separately with its source, each GPU's path, and the memory that
        the VM locks and maps. Default: equal findings in one block.
      prometheus: Print Prometheus' text format.
      pool: Compare each host of a pool with the majority of its kind (processor and GPU model); may
        be repeated.

    Examples:
      homenode doctor VM.xml numactl.txt
      homenode doctor --pool captures/
    """

    files: Annotated[tuple[str, ...], Arg("[FILE]...", complete="vms")] = ()
    host: HostOption = None
    lspci: LspciOption = None
    h2d: Annotated[tuple[str, ...], Opt("--h2d", "[BDF=]GB/S")] = ()
    known_width: Annotated[tuple[str, ...], Opt("--known-width", "BDF=LANES", rare=True)] = ()
    under_load: Annotated[bool, Flag("--under-load")] = False
    load_command: Annotated[str | None, Opt("--load-command", "COMMAND", rare=True)] = None
    expect: Annotated[str | None, Opt("--expect", "FILE")] = None
    explain: Annotated[bool, Flag("--explain")] = False
    prometheus: Annotated[bool, Flag("--prometheus", rare=True)] = False
    pool: Annotated[tuple[str, ...], Opt("--pool", "POOL")] = ()
    json: JsonOption = False


class RetrainArguments(Struct, frozen=True, kw_only=True):
    """Train the link above a device again, at the fastest speed that both ends support.

    Without --apply it shows the registers that it would write. The port must not have a device that
    a VM or a driver uses.

    Options:
      devices: PCI addresses of the devices whose links are trained again.
      target: PCIe generation to train to. Default: the fastest that both ends support.
      apply: Train the links again. Default: only print the registers to write.
      print_unit: Print a systemd unit that trains the links at boot. Requires that only root can
        change the program.
      print_hook: Print a libvirt hook that trains the links at VM start. Requires that only root
        can change the program.

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
    """Arguments of the call from the hook of `retrain --print-hook`; the domain XML is its standard
    input."""

    words: Annotated[tuple[str, ...], Arg("DOMAIN OPERATION")] = ()
    target: Annotated[int | None, Opt("--target", "GEN")] = None
