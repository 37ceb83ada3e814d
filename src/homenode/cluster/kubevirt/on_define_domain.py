"""onDefineDomain: what the sidecar hook answers, as a pure step: text in, text and notes out.

Source: KubeVirt's sidecar-shim, which runs `onDefineDomain --vmi JSON --domain XML` with nothing on
standard input, takes standard output for the new document, and fails the VM's start on any exit
status but 0.
"""

from collections.abc import Callable
from enum import StrEnum
from typing import TypeVar

from msgspec import Struct

from homenode.cluster.kubevirt.manifest_options import OnError
from homenode.cluster.kubevirt.placing import place_devices
from homenode.cluster.kubevirt.vmi import Vmi, read_vmi
from homenode.errors import HomenodeError, UsageError
from homenode.machine.snapshot.protocol import Snapshot
from homenode.vm.plan_options import PciGranularity

ON_ERROR_ANNOTATION = "homenode/on-error"
GRANULARITY_ANNOTATION = "homenode/pci-granularity"
CHOICES = {ON_ERROR_ANNOTATION: OnError, GRANULARITY_ANNOTATION: PciGranularity}
"""What the hook's annotations may say; with another word the VM does not start."""

Choice = TypeVar("Choice", bound=StrEnum)


class DomainAnswer(Struct, frozen=True):
    """What the hook gives."""

    document: bytes | None  # None where it fails
    exit_code: int
    notes: tuple[str, ...]  # lines for standard error


def answer(
    vmi: str,
    domain: bytes,
    open_host: Callable[[], Snapshot],
    *,
    on_error: OnError | None = None,
    granularity: PciGranularity | None = None,
) -> DomainAnswer:
    """The hook's answer to one call. on_error, granularity: None = as the VMI's annotations say,
    else `fail` and `cell`."""
    policy = on_error or OnError.FAIL
    try:
        read = read_vmi(vmi, "--vmi")
        policy = on_error or _choice_of(read, ON_ERROR_ANNOTATION, OnError, OnError.FAIL)
        by = granularity or _choice_of(
            read, GRANULARITY_ANNOTATION, PciGranularity, PciGranularity.CELL
        )
        placed = place_devices(
            domain, open_host(), asked_for=read.guest_addresses, granularity=by, source="--domain"
        )
    except HomenodeError as error:
        return _failure(domain, policy, str(error), error.exit_code)
    except (OSError, MemoryError, RecursionError) as error:
        return _failure(domain, policy, f"{type(error).__name__}: {error}", 3)
    return DomainAnswer(placed.document, 0, placed.notes)


def _failure(domain: bytes, policy: OnError, message: str, exit_code: int) -> DomainAnswer:
    if policy is OnError.FAIL:
        return DomainAnswer(None, exit_code, (f"error: {message}",))
    return DomainAnswer(
        domain, 0, (f"error: {message}", "the document is passed on unchanged (on-error)")
    )


def _choice_of(vmi: Vmi, annotation: str, choices: type[Choice], default: Choice) -> Choice:
    text = vmi.annotations.get(annotation)
    if text is None:
        return default
    if text not in list(choices):
        raise UsageError(
            f"annotation {annotation}: expected one of {', '.join(choices)}, found {text[:60]!r}"
        )
    return choices(text)
