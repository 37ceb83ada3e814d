"""Options that several commands share. [I/O]"""

from pathlib import Path
from typing import Annotated

import typer

HostOption = Annotated[
    str | None,
    typer.Option(
        "--host",
        metavar="SOURCE",
        help="The host: a snapshot, a folder or tar of /sys, an hwloc XML, a host.toml, lspci -vvv "
        "text, or the name of a shipped host. Default: this machine.",
    ),
]

LspciOption = Annotated[
    Path | None,
    typer.Option(
        "--lspci",
        metavar="FILE",
        help="Output of lspci -vvv to lay over the host: its PCI tree replaces the host's.",
    ),
]

JsonOption = Annotated[bool, typer.Option("--json", help="Print the documented JSON format.")]
