"""What is asked of each command: a record of its options, for help and completion as well [I/O]

Here are the options that several share.
"""

from pathlib import Path
from typing import Annotated

from homenode.opt import Arg, Flag, Opt

HostOption = Annotated[str | None, Opt("--host", "SOURCE", complete="host_sources")]

LspciOption = Annotated[Path | None, Opt("--lspci", "FILE", rare=True)]


DomainsArgument = Annotated[tuple[str, ...], Arg("NAME...", complete="domain_names")]

ConnectOption = Annotated[str, Opt("--connect -c", "URI")]

OutputOption = Annotated[Path | None, Opt("--output -o", "FILE")]

ForceOption = Annotated[bool, Flag("--force -f", rare=True)]

JsonOption = Annotated[bool, Flag("--json")]

DryRunOption = Annotated[bool, Flag("--dry-run -n")]

SavePlanOption = Annotated[Path | None, Opt("--save-plan", "PLAN.json")]

QuietOption = Annotated[bool, Flag("--quiet -q", rare=True)]

PoolOption = Annotated[tuple[str, ...], Opt("--pool", "POOL")]


ResultsOption = Annotated[tuple[str, ...], Opt("--results", "DIR")]

AfterOption = Annotated[tuple[Path, ...], Opt("--after", "PLAN.json", panel="Placement", rare=True)]
