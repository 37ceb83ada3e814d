"""GPU architectures: what to compile for, as the drivers' own tools give it.

    nvidia-smi --query-gpu=compute_cap --format=csv,noheader      9.0
    rocminfo                                                      Name:   gfx942

Seen with nvidia-smi 510 and later (older versions do not have the field), rocminfo of ROCm 5 to 7.
"""

import re

from homenode.errors import ParseError

NVIDIA_COMMAND = ("nvidia-smi", "--query-gpu=compute_cap", "--format=csv,noheader")
AMD_COMMAND = ("rocminfo",)

_CAPABILITY = re.compile(r"(\d{1,2})\.(\d)", re.ASCII)
_GFX = re.compile(r"\s*Name:\s+(gfx[0-9a-f]{3,5})\s*", re.ASCII)


def parse_nvidia(text: str) -> tuple[str, ...]:
    """Return architectures in CMake's form, without duplicates, ascending.

    >>> parse_nvidia("9.0\\n9.0\\n12.0\\n")
    ('90', '120')

    Raises ParseError.
    """
    capabilities = set()
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        match = _CAPABILITY.fullmatch(line.strip())
        if match is None:
            raise ParseError("nvidia-smi", "a compute capability such as 9.0", line, line=number)
        capabilities.add(int(match[1] + match[2]))
    if not capabilities:
        raise ParseError("nvidia-smi", "a compute capability of each GPU")
    return tuple(str(capability) for capability in sorted(capabilities))


def parse_amd(text: str) -> tuple[str, ...]:
    """Return architectures in the compiler's form and order, without duplicates. Raises ParseError.

    >>> parse_amd("  Name:                    AMD EPYC\\n  Name:                    gfx942\\n")
    ('gfx942',)
    """
    lines = text.split("\n")
    names = dict.fromkeys(m[1] for line in lines if (m := _GFX.fullmatch(line)))
    if not names:
        raise ParseError("rocminfo", "a line such as 'Name: gfx942'")
    return tuple(names)


_BY_NAME = re.compile(r"(?:\d{2,3}[af]?|gfx[0-9a-f]{3,5})", re.ASCII)


def parse_names(text: str) -> tuple[str, ...]:
    """Parse architectures of one vendor given by the user: "90,120", "gfx950". Raises ParseError.

    >>> parse_names("90,120"), parse_names("gfx950")
    (('90', '120'), ('gfx950',))
    """
    names = tuple(dict.fromkeys(part.strip() for part in text.split(",")))
    is_amd = {name.startswith("gfx") for name in names}
    if len(is_amd) != 1 or not all(map(_BY_NAME.fullmatch, names)):
        raise ParseError("architecture", "90, 120 or gfx950, all of one vendor", text[:80])
    return names
