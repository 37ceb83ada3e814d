"""BootOutcome: what a test guest that did not report comes to, from what its console says."""

from homenode.catalogue import finding
from homenode.errors import HostError
from homenode.findings import Finding
from homenode.process import ToolTimeoutError
from homenode.verify.boot.initramfs import BEGIN

CONSOLE_HINT = "look at its console with --keep DIR"


def refusal(who: str, said: str, source: str) -> Finding:
    """A finding that a guest like the document's cannot be started."""
    return finding(
        "guest-refused",
        "the test guest",
        expected=f"{who} to start it",
        observed=said.strip()[:400] or "no reason given",
        source=source,
    )


def crash(console: str, source: str) -> Finding:
    """A finding that the guest's kernel did not come up."""
    return finding(
        "guest-crashed",
        "the test guest",
        expected="its kernel to come up",
        observed=f"last line of its console: {last_line(console)!r}",
        source=source,
    )


def silence(console: str, limit_s: float, source: str) -> ToolTimeoutError:
    """The error of a guest that has not powered off in time."""
    return ToolTimeoutError(
        f"{source}: expected the test guest to power off within {limit_s:g} s, found it running; "
        f"last line of its console: {last_line(console)!r}",
        hint=f"give it longer with --timeout, or {CONSOLE_HINT}",
    )


def partial(size: int, source: str) -> HostError:
    """The error of a guest that came up and did not report whole. size: of what came, in bytes."""
    return HostError(
        f"{source}: expected a whole report from the test guest, found {size} bytes of one",
        hint=CONSOLE_HINT,
    )


def came_up(console: str) -> bool:
    """Whether the guest's init has run."""
    return BEGIN in console


def last_line(console: str) -> str:
    """The last line of a guest's console, as far as it can be printed."""
    last = next((line for line in reversed(console.splitlines()) if line.strip()), "")
    return "".join(letter for letter in last.strip() if letter.isprintable())[:200]
