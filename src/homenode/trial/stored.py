"""Stored: what a trial was begun with, beside its journal, so that `--resume` measures the same."""

from dataclasses import dataclass

from homenode import formats
from homenode.domain.overlay_disks import WritableDisk
from homenode.errors import InputError
from homenode.results.model import Condition
from homenode.trial.orders import Measuring
from homenode.trial.reaching import Reaching


@dataclass(frozen=True, slots=True)
class Begun:
    """Everything but the documents and the plans. disks, nvram: of the copy, see copying.Prepared.

    apply_words: options of `homenode apply` that the layouts were planned with.
    """

    measuring: Measuring
    reaching: Reaching
    host_kind: str | None
    versions: tuple[Condition, ...]
    emulated: bool
    apply_words: tuple[str, ...] = ()
    disks: tuple[WritableDisk, ...] = ()
    nvram: tuple[str, str] | None = None


def encode_begun(begun: Begun) -> bytes:
    """As JSON."""
    return formats.encode("trial-config", begun).encode()


def decode_begun(content: bytes, source: str) -> Begun:
    """Raises InputError."""
    try:
        return formats.decode(content, "trial-config", Begun, source)
    except InputError as error:
        raise InputError(
            error.message, hint="homenode trial --undo takes it back; then begin it anew"
        ) from None
