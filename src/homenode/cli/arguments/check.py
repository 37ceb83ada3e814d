"""What is asked of verify, doctor and watch, and of what they compare with. [I/O]"""

from pathlib import Path
from typing import Annotated

from msgspec import Struct

from homenode.bdf import Bdf
from homenode.cli.arguments import ForceOption, HostOption, JsonOption, LspciOption, OutputOption
from homenode.opt import Arg, Flag, Opt
from homenode.vm.hypervisor.connection import DEFAULT

BOOT = "Test guest"

SignersOption = Annotated[
    Path | None,
    Opt(
        "--allowed-signers",
        "FILE",
        "Who may have signed certificates: ssh-keygen's allowed signers, or public keys.",
        rare=True,
    ),
]


class VerifyArguments(Struct, frozen=True, kw_only=True):
    """Check a VM: its file, whether it starts here, what its guest sees.

    Without --host, this machine is asked for everything that the VM needs of it.

    Examples:
      homenode verify tuned.xml --plan plan.json --boot
      homenode verify gpu-vm --start
    """

    document: Annotated[
        Path | None, Arg("[VM]", "The domain document, or a domain of this libvirt.")
    ] = None
    plan: Annotated[Path | None, Opt("--plan", "PLAN.json", "The saved plan to compare with.")] = (
        None
    )
    host: HostOption = None
    lspci: LspciOption = None
    boot: Annotated[
        bool,
        Flag(
            "--boot",
            "Boot a small guest with the same vCPUs, cells and PCIe tree, and read it.",
            panel=BOOT,
        ),
    ] = False
    start: Annotated[
        bool,
        Flag("--start", "Start the domain paused with its real devices, look at it, and end it."),
    ] = False
    yes: Annotated[bool, Flag("--yes -y", "With --start: do not ask.", rare=True)] = False
    guest: Annotated[
        str | None,
        Opt(
            "--guest", "SOURCE", "The real guest's own view: a capture made inside it, or ssh:HOST."
        ),
    ] = None
    target: Annotated[
        str | None,
        Opt(
            "--target",
            "NAME",
            "For --guest: the hypervisor that the plan was made for, as of `plan --target`.",
            rare=True,
        ),
    ] = None
    live: Annotated[
        str | None,
        Opt(
            "--live",
            "NAME",
            "A running domain of this machine, from outside: threads, memory, IRQs.",
            complete="domain_names",
        ),
    ] = None
    connect: Annotated[
        str | None,
        Opt(
            "--connect -c",
            "URI",
            "The libvirt that is asked; for --boot none = QEMU directly. Default: "
            "qemu:///system, and for --boot QEMU where that does not answer.",
            rare=True,
        ),
    ] = None
    kernel: Annotated[
        Path | None, Opt("--kernel", "FILE", "Kernel for --boot.", panel=BOOT, rare=True)
    ] = None
    timeout: Annotated[
        float | None,
        Opt("--timeout", "SECONDS", "For --boot. Default: by vCPUs.", ge=1, panel=BOOT, rare=True),
    ] = None
    keep: Annotated[
        Path | None,
        Opt(
            "--keep", "DIR", "Keep the test guest's files and console here.", panel=BOOT, rare=True
        ),
    ] = None
    svg: Annotated[
        Path | None,
        Opt("--svg", "FILE", "Draw the guest here, and host and plan in FILE's *-plan.svg."),
    ] = None
    certify: Annotated[
        Path | None,
        Opt(
            "--certify", "KEY", "With --live: sign what is proved, with a key of ssh, into -o FILE."
        ),
    ] = None
    certificate: Annotated[
        Path | None, Opt("--certificate", "FILE", "Check and print one; of a file, or of a domain.")
    ] = None
    allowed_signers: SignersOption = None
    in_domain: Annotated[
        bool,
        Flag(
            "--in-domain",
            "With --certify: keep it in the domain's metadata, for `watch`. Undo: homenode restore "
            "NAME.",
            rare=True,
        ),
    ] = False
    dry_run: Annotated[
        bool, Flag("--dry-run", "With --certify: show it; sign and keep nothing.", rare=True)
    ] = False
    output: Annotated[
        Path | None,
        Opt("--output -o", "FILE", "The certificate; of one that is checked, its page.", rare=True),
    ] = None
    proof: Annotated[
        bool, Flag("--proof", "Check the proof that the saved plan P.json carries.")
    ] = False
    json: JsonOption = False


class WhyArguments(Struct, frozen=True, kw_only=True):
    """Say why something is slow or fails, from files, outputs and logs.

    Takes domain XML, qm and Cloud Hypervisor configurations, commands of QEMU, lspci, lstopo,
    numactl -H, nvidia-smi, NCCL logs and files, dmesg, kubelet configurations, pods, error lines,
    captures: several in one file, of host and guest. Exit code 1: a cause was found.

    Examples:
      homenode why vm.xml error.log lspci.txt
      homenode why - < paste.txt
    """

    files: Annotated[tuple[str, ...], Arg("FILE...", "What you have; - for a paste.")] = ()
    host: HostOption = None
    json: JsonOption = False


FleetOption = Annotated[
    tuple[str, ...],
    Opt("--pool", "POOL", "Hosts as in `pool show`: each is compared with hosts of its kind."),
]


class DoctorArguments(Struct, frozen=True, kw_only=True):
    """Find slow links, bad settings and costly pins, each with its fix.

    Nothing is changed. The exit code is 1 where something is critical or a warning.

    Examples:
      homenode doctor VM.xml --host hgx-h100
      homenode doctor --pool captures/
    """

    document: Annotated[
        str | None,
        Arg("[VM]", "Also check this VM: a document, a file of any target, or a domain's name."),
    ] = None
    host: HostOption = None
    lspci: LspciOption = None
    live: Annotated[
        str | None,
        Opt(
            "--live",
            "NAME",
            "Also check this domain of this machine's libvirt.",
            complete="domain_names",
        ),
    ] = None
    h2d: Annotated[
        tuple[str, ...],
        Opt(
            "--h2d",
            "[BDF=]GB/S",
            "Host-to-device copies as measured: of one GPU, or of any. Repeatable.",
        ),
    ] = ()
    known_width: Annotated[
        tuple[str, ...],
        Opt(
            "--known-width",
            "BDF=LANES",
            "A slot that is wired narrower than its port. Repeatable.",
            rare=True,
        ),
    ] = ()
    under_load: Annotated[
        bool, Flag("--under-load", "Read links while a copy runs: nvbandwidth, PyTorch, ...")
    ] = False
    load_command: Annotated[
        str | None,
        Opt("--load-command", "COMMAND", "With --under-load: what copies to the GPUs.", rare=True),
    ] = None
    expect: Annotated[
        Path | None, Opt("--expect", "SITE.toml", "Compare the host with its recorded state.")
    ] = None
    fix: Annotated[
        Path | None, Opt("--fix", "FILE", "Plan the same VM again and write its document here.")
    ] = None
    everything: Annotated[bool, Flag("--all", "Also print what is in order.")] = False
    prometheus: Annotated[
        bool, Flag("--prometheus", "Print Prometheus' text format.", rare=True)
    ] = False
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

    devices: Annotated[
        tuple[Bdf, ...], Arg("BDF...", "Devices whose links are trained again.", parse=Bdf.parse)
    ] = ()
    target: Annotated[
        int | None,
        Opt("--target", "GEN", "Generation to train to. Default: the fastest that both ends can."),
    ] = None
    apply: Annotated[bool, Flag("--apply", "Write the registers. Default: a dry run.")] = False
    print_unit: Annotated[
        bool, Flag("--print-unit", "Print a systemd unit that does this at boot.")
    ] = False
    print_hook: Annotated[
        bool, Flag("--print-hook", "Print a libvirt hook that does this at VM start.")
    ] = False
    json: JsonOption = False


class RetrainHookArguments(Struct, frozen=True, kw_only=True):
    """What the libvirt hook of `retrain --print-hook` calls; the domain's XML is its input."""

    words: Annotated[tuple[str, ...], Arg("DOMAIN OPERATION")] = ()
    target: Annotated[int | None, Opt("--target", "GEN", "")] = None


class CertifyArguments(Struct, frozen=True, kw_only=True):
    """Certify a host: its topology, links and bandwidth floors, to compare with later.

    `homenode doctor --expect SITE.toml` then finds any drift.

    Examples:
      homenode watch certify -o site.toml --floor h2d=50
      homenode doctor --expect site.toml
    """

    host: HostOption = None
    output: OutputOption = None
    floor: Annotated[
        tuple[str, ...], Opt("--floor", "NAME=GB/S", "A bandwidth that must be reached: h2d=50.")
    ] = ()
    pool: FleetOption = ()
    force: ForceOption = False


class WatchArguments(Struct, frozen=True, kw_only=True):
    """Compare a host with its certified state, and report what is new.

    Reads sysfs, /proc and libvirt; wakes no device and changes nothing. One alert for each cause: a
    slow link, a changed topology, a missing GPU, fewer huge pages, a VM that is not as planned.

    Examples:
      homenode watch --expect site.toml
      homenode watch --textfile /var/lib/prometheus/node-exporter/homenode.prom
    """

    host: Annotated[
        str | None, Opt("--host", "CAPTURE", "Check a capture instead of this machine.")
    ] = None
    expect: Annotated[
        Path | None,
        Opt(
            "--expect",
            "SITE.toml",
            "The recorded state (homenode watch certify -o). Default: /etc/homenode/expect.toml "
            "if it exists.",
        ),
    ] = None
    state: Annotated[
        Path | None,
        Opt(
            "--state",
            "DIR",
            "Keeps the previous result, to find what is new. Default: /var/lib/homenode/watch; "
            "for a capture none.",
        ),
    ] = None
    textfile: Annotated[
        Path | None,
        Opt("--textfile", "FILE.prom", "Write metrics for the node exporter's textfile collector."),
    ] = None
    connect: Annotated[str, Opt("--connect -c", "URI", "libvirt of this machine.")] = DEFAULT
    allowed_signers: SignersOption = None
    json: JsonOption = False
