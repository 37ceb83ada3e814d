"""What is asked of each command: a record of its options, for help and completion as well [I/O]

Here are the options that several share.
"""

from pathlib import Path
from typing import Annotated

from homenode.opt import Arg, Flag, Opt

HostOption = Annotated[
    str | None,
    Opt(
        "--host",
        "SOURCE",
        complete="host_sources",
        help="A source of a host. Default: this machine.",
    ),
]

LspciOption = Annotated[
    Path | None,
    Opt(
        "--lspci",
        "FILE",
        rare=True,
        help="Output of lspci -D -nn -vvv, which replaces the host's PCI tree.",
    ),
]


DomainsArgument = Annotated[tuple[str, ...], Arg("NAME...", complete="domain_names")]

ConnectOption = Annotated[
    str,
    Opt(
        "--connect -c",
        "URI",
        help="The libvirt daemon: qemu:///system, qemu+ssh://root@gpu7/system.",
    ),
]

OutputOption = Annotated[Path | None, Opt("--output -o", "FILE")]

ForceOption = Annotated[
    bool, Flag("--force -f", rare=True, help="Overwrite files that homenode did not write.")
]

JsonOption = Annotated[bool, Flag("--json", help="Print JSON.")]

DryRunOption = Annotated[
    bool,
    Flag("--dry-run -n", help="Print the difference and each reason to refuse; change nothing."),
]

SavePlanOption = Annotated[Path | None, Opt("--save-plan", "PLAN.json", help="Write the plan.")]

QuietOption = Annotated[
    bool,
    Flag(
        "--quiet -q",
        rare=True,
        help="Do not print the explanation; critical findings are printed, on standard error.",
    ),
]

PoolOption = Annotated[
    tuple[str, ...], Opt("--pool", "POOL", help="The hosts: a pool; may be repeated.")
]


ResultsOption = Annotated[
    tuple[str, ...],
    Opt(
        "--results",
        "DIR",
        help="Results of this host; they overrule the table of auto; may be repeated.",
    ),
]

AfterOption = Annotated[
    tuple[Path, ...],
    Opt(
        "--after",
        "PLAN.json",
        panel="Placement",
        rare=True,
        help="A saved plan whose VM counts as if it ran there; may be repeated.",
    ),
]
