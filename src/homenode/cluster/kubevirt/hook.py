"""onDefineDomain: the executable that KubeVirt's sidecar-shim runs. [I/O]

It imports next to nothing, since it runs in a container of 0.2 CPUs and 64 MiB while a VM waits.
"""

import errno
import gc
import os
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from homenode.errors import HostError, UsageError

if TYPE_CHECKING:
    from homenode.cluster.kubevirt.manifest_options import OnError
    from homenode.cluster.kubevirt.on_define_domain import Choice, DomainAnswer
    from homenode.vm.plan_options import PciGranularity

_USAGE = (
    "usage: onDefineDomain --vmi JSON --domain XML [--on-error fail|passthrough] "
    "[--pci-granularity cell|root-complex|switch] [--root DIR]"
)
_NAMES = ("--vmi", "--domain", "--on-error", "--pci-granularity", "--root")


def main() -> None:
    """Answer one call of the shim, and exit with the contract's code."""
    gc.disable()  # the process ends before there is anything to collect
    try:
        values = parse_options(sys.argv[1:])
        sys.exit(run_hook(values))
    except UsageError as error:
        notify(str(error))
        sys.exit(error.exit_code)


def run_hook(values: dict[str, str]) -> int:
    """Write the new document, or nothing, to standard output; the exit code. Raises UsageError."""
    from homenode.cluster.kubevirt.manifest_options import OnError
    from homenode.vm.plan_options import PciGranularity

    on_error = _choice(values, "--on-error", OnError)
    granularity = _choice(values, "--pci-granularity", PciGranularity)
    root = values.get("--root", "/")
    return write(ask(values["--vmi"], values["--domain"], on_error, granularity, root))


def ask(
    vmi: str,
    domain: str,
    on_error: "OnError | None",
    granularity: "PciGranularity | None",
    root: str = "/",
) -> "DomainAnswer":
    """The hook's answer. root: where the host's /sys lies, as the container sees it."""
    from homenode.cluster.kubevirt.on_define_domain import answer
    from homenode.machine.snapshot.store import FolderSnapshot

    return answer(
        vmi,
        os.fsencode(domain),
        lambda: FolderSnapshot("this machine", root),
        on_error=on_error,
        granularity=granularity,
    )


def write(answer: "DomainAnswer") -> int:
    """Put an answer where the shim looks for it; its exit code."""
    for note in answer.notes:
        notify(note)
    if answer.document is None:
        return answer.exit_code
    try:
        if sys.stdout is None:  # it was closed before Python started
            raise OSError(errno.EBADF, os.strerror(errno.EBADF))
        sys.stdout.buffer.write(answer.document)
        sys.stdout.buffer.flush()
    except OSError as error:
        notify(f"error: standard output: cannot write the definition: {error}")
        sys.stdout = None  # what is left in it would fail again at the end
        return HostError.exit_code
    return answer.exit_code


def notify(note: str) -> None:
    """A line or two for the pod's log; nothing that a name holds can make it more."""
    for line in note.split("\n  hint: "):
        safe = "".join(c if c.isprintable() else ascii(c)[1:-1] for c in line[:4000])
        print(f"onDefineDomain: {safe}", file=sys.stderr)


def parse_options(arguments: Sequence[str]) -> dict[str, str]:
    """Options by name. Raises UsageError."""
    values: dict[str, str] = {}
    words = list(arguments)
    while words:
        name, is_one, value = words.pop(0).partition("=")
        if name not in _NAMES:
            raise UsageError(f"unexpected argument {name[:60]!r}", hint=_USAGE)
        if not is_one:
            if not words:
                raise UsageError(f"{name}: missing value", hint=_USAGE)
            value = words.pop(0)
        values[name] = value
    missing = [name for name in _NAMES[:2] if name not in values]
    if missing:
        raise UsageError(f"missing option {' and '.join(missing)}", hint=_USAGE)
    return values


def _choice(values: dict[str, str], name: str, choices: "type[Choice]") -> "Choice | None":
    value = values.get(name)
    if value is not None and value not in list(choices):
        raise UsageError(
            f"{name}: expected one of {', '.join(choices)}, found {value[:60]!r}", hint=_USAGE
        )
    return None if value is None else choices(value)


if __name__ == "__main__":
    main()
