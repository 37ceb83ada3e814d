"""homenode restore: the original document, exactly. [I/O]"""

from pathlib import Path
from typing import Annotated

import typer

from homenode.cli.terminal import note


def restore(
    document: Annotated[
        Path,
        typer.Argument(metavar="OUT.xml", help="A document that `homenode plan -o` wrote."),
    ],
) -> None:
    """Give back the original of a tuned document, byte for byte.

    Refuses, and changes nothing, if the tuned document or its saved original was edited since.
    """
    from homenode.domain.restore import restore as restore_original

    restore_original(document)
    note(f"restored {document}")
