"""BootOutcome: what a test guest that did not report comes to, from what its console says. [I/O]"""

from pathlib import Path

from homenode.errors import HostError
from homenode.findings import Finding, Severity
from homenode.process import ToolTimeoutError
from homenode.verify.boot.initramfs import BEGIN

CONSOLE_HINT = "look at its console with --keep DIR"


def refusal(who: str, said: str, source: str) -> Finding:
    """A finding that a guest like the document's cannot be started."""
    return Finding(
        id="guest-refused",
        severity=Severity.CRITICAL,
        subject="the test guest",
        expected=f"{who} to start it",
        observed=said.strip()[:400] or "no reason given",
        cost="the VM itself would not start either",
        fix="correct what the document check names, then boot again",
        source=source,
    )


def crash(folder: Path, source: str) -> Finding:
    """A finding that the guest's kernel did not come up."""
    return Finding(
        id="guest-crashed",
        severity=Severity.CRITICAL,
        subject="the test guest",
        expected="its kernel to come up",
        observed=f"last line of its console: {last_line(folder)!r}",
        cost="the VM itself may not boot",
        fix=CONSOLE_HINT,
        source=source,
    )


def silence(folder: Path, limit_s: float, source: str) -> ToolTimeoutError:
    """The error of a guest that has not powered off in time."""
    return ToolTimeoutError(
        f"{source}: expected the test guest to power off within {limit_s:g} s, found it running; "
        f"last line of its console: {last_line(folder)!r}",
        hint=f"give it longer with --timeout, or {CONSOLE_HINT}",
    )


def partial(folder: Path, source: str) -> HostError:
    """The error of a guest that came up and did not report whole."""
    size = (folder / "report").stat().st_size
    return HostError(
        f"{source}: expected a whole report from the test guest, found {size} bytes of one",
        hint=CONSOLE_HINT,
    )


def came_up(folder: Path) -> bool:
    """Whether the guest's init has run."""
    return BEGIN in (folder / "console").read_text(errors="replace")


def last_line(folder: Path) -> str:
    """The last line of a guest's console, as far as it can be printed."""
    text = (folder / "console").read_text(errors="replace")
    last = next((line for line in reversed(text.splitlines()) if line.strip()), "")
    return "".join(letter for letter in last.strip() if letter.isprintable())[:200]
