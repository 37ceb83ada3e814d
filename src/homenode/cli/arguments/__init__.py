"""Arguments of each command: a record of its options, also for help and completion. [I/O]

This file has the options that several commands share.
"""

from pathlib import Path
from typing import Annotated

from homenode.option import Flag, Opt

HostOption = Annotated[
    str | None,
    Opt("--host", "SOURCE", "Host to read. Default: this machine.", complete="host_sources"),
]
LspciOption = Annotated[
    Path | None,
    Opt("--lspci", "FILE", "Read the PCI tree from this output of lspci -D -nn -vvv.", rare=True),
]
ConnectOption = Annotated[
    str, Opt("--connect -c", "URI", "The libvirt daemon, such as qemu+ssh://root@gpu7/system.")
]
ForceOption = Annotated[
    bool, Flag("--force -f", "Overwrite files that homenode did not write.", rare=True)
]
ExplainOption = Annotated[bool, Flag("--explain", help="Print all details.")]
JsonOption = Annotated[bool, Flag("--json", "Print JSON.")]
SavePlanOption = Annotated[
    Path | None, Opt("--save-plan", "PLAN.json", "Write the plan, for verify --plan.")
]
QuietOption = Annotated[
    bool, Flag("--quiet -q", "Print critical findings alone, on standard error.", rare=True)
]
PoolOption = Annotated[
    tuple[str, ...],
    Opt("--pool", "POOL", "Directory of captures, host source, or NAME*N; may be repeated."),
]
ResultsOption = Annotated[
    tuple[str, ...],
    Opt(
        "--results",
        "DIR",
        "Own results, which overrule the rules of auto; may be repeated.",
    ),
]
AfterOption = Annotated[
    tuple[Path, ...],
    Opt(
        "--after",
        "PLAN.json",
        "A saved plan whose VM counts as if it ran there; may be repeated.",
        panel="Placement",
        rare=True,
    ),
]
