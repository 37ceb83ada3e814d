"""Script: shell text for hosts; every value is one word by `quote_word`.

Scripts need bash, coreutils and util-linux.
"""

import shlex
from collections.abc import Iterable

from homenode.cpuset import CpuSet
from homenode.errors import InputError, ParseError
from homenode.package_data import read_package_text
from homenode.vm.plan import Plan
from homenode.vm.targets.target import is_vgpu


def quote_word(word: str) -> str:
    """Quote one word of a shell. Raises InputError for control characters."""
    if not word.isprintable():
        raise InputError(
            f"script: expected printable words, found {word!r}",
            hint="rename the VM or the file that holds it",
        )
    # A comma outside quotes seems an error to checkers of bash arrays.
    return shlex.quote(word) if "," not in word else "'" + word.replace("'", "'\"'\"'") + "'"


def format_array(name: str, words: Iterable[str]) -> str:
    """Return an array of bash, a line for each element."""
    lines = "".join(f"  {quote_word(word)}\n" for word in words)
    return f"{name}=(\n{lines})\n" if lines else f"{name}=()\n"


def assign_word(name: str, word: str) -> str:
    return f"{name}={quote_word(word)}\n"


def plan_values(plan: Plan) -> str:
    """Return the variables of `PIN` and `PREPARE`: pins, devices, huge pages."""
    return "".join(
        (
            assign_word(
                "emulator_pus", "" if plan.vm.emulator_pus is None else str(plan.vm.emulator_pus)
            ),
            format_array("vcpu_pus", map(str, plan.vcpu_pins)),
            format_array("iothread_pus", (str(pus) for pus in plan.iothread_pus)),
            format_array(
                "devices", (str(device.bdf) for device in plan.vm.hostdevs if not is_vgpu(device))
            ),
            "# host node, page size in kB, pages\n",
            format_array(
                "huge_pages",
                (f"{r.node} {r.page_bytes // 1024} {r.pages}" for r in plan.page_reservations),
            ),
        )
    )


PREPARE, PIN = (
    read_package_text("vm", "targets", "scripts", f"{n}.sh") for n in ("prepare", "pin")
)
"""Functions of bash."""


def split_words(text: str, place: str) -> tuple[str, ...]:
    """Return the words of a shell. Raises ParseError for a quote that does not end."""
    try:
        return tuple(shlex.split(text))
    except ValueError:
        raise ParseError(place, "words of a shell", text.strip()[:60]) from None


def find_array(text: str, name: str) -> tuple[str, ...] | None:
    """The words of an array in a script of homenode; None if it has none. Raises ParseError."""
    start = f"\n{name}=("
    at = text.find(start)
    if at < 0:
        return None
    end = text.find("\n)", at) if not text.startswith(")", at + len(start)) else at + len(start)
    return split_words(text[at + len(start) : end], name) if end >= 0 else None


def find_value(text: str, name: str) -> str | None:
    """The word of a variable in a script of homenode; None if it has none. Raises ParseError."""
    at = text.find(f"\n{name}=")
    if at < 0:
        return None
    line = text[at + len(name) + 2 :].partition("\n")[0]
    words = split_words(line, name)
    return words[0] if words else ""


def parse_pins(text: str) -> tuple[tuple[CpuSet, ...], CpuSet | None, tuple[CpuSet, ...]]:
    """Return the vCPU, emulator and IOThread pins of a script's values."""
    emulator = find_value(text, "emulator_pus")
    return (
        tuple(CpuSet.parse(pus, "vcpu_pus") for pus in find_array(text, "vcpu_pus") or ()),
        CpuSet.parse(emulator, "emulator_pus") if emulator else None,
        tuple(CpuSet.parse(pus, "iothread_pus") for pus in find_array(text, "iothread_pus") or ()),
    )
