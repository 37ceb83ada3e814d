"""nvidia-smi mig -lgi and nvidia-smi -L: the MIG instances of NVIDIA's GPUs.

    |   0  MIG 1g.10gb         19        9          2:1     |

    GPU 0: NVIDIA H100 80GB HBM3 (UUID: GPU-5c8e...)
      MIG 1g.10gb     Device  0: (UUID: MIG-8d1a...)

The first lists GPU instances, and needs root; the second lists compute instances, which are what
programs see: a GPU instance may hold several, and none.

Seen of drivers 470 to 580. Source: NVIDIA MIG user guide, "Creating GPU Instances".
"""

from msgspec import Struct

from homenode.errors import ParseError

INSTANCES_COMMAND = ("nvidia-smi", "mig", "-lgi")
LIST_COMMAND = ("nvidia-smi", "-L")
MAX_ROWS = 4096

_INSTANCES = "nvidia-smi mig -lgi"
_LIST = "nvidia-smi -L"


class MigInstance(Struct, frozen=True):
    """A GPU instance. gpu: the tool's number of its GPU. profile: "1g.10gb+me".

    start, size: its place among the GPU's memory slices.
    """

    gpu: int
    number: int
    profile: str
    start: int
    size: int


class MigDevice(Struct, frozen=True):
    """A compute instance. device: its number on its GPU, as `index` of nvidia-smi -q -x."""

    gpu: int
    device: int
    profile: str
    uuid: str | None


def parse_instances(text: str) -> tuple[MigInstance, ...]:
    """The GPU instances, in the tool's order. Headings, borders and remarks such as "No GPU
    instances found" are skipped.

    Raises ParseError for a row of a MIG profile without its four numbers, and for an instance that
    is listed twice.
    """
    found: dict[tuple[int, int], MigInstance] = {}
    for number, line in enumerate(text.splitlines(), start=1):
        words = line.strip().strip("|").split()
        if len(words) < 2 or words[1] != "MIG":
            continue
        start, colon, size = words[-1].partition(":")
        numbers = [_number(word) for word in (words[0], *words[3:-1], start, size)]
        if len(words) != 6 or not colon or None in numbers or len(found) >= MAX_ROWS:
            expected = "GPU, MIG, profile, profile's ID, instance's ID, start:size"
            raise ParseError(_INSTANCES, expected, line.strip()[:80], line=number)
        gpu, _, instance, first, slices = (one or 0 for one in numbers)
        if (gpu, instance) in found:
            raise ParseError(_INSTANCES, "each instance once", line.strip()[:80], line=number)
        found[gpu, instance] = MigInstance(gpu, instance, words[2], first, slices)
    return tuple(found.values())


def parse_list(text: str) -> tuple[MigDevice, ...]:
    """The compute instances, in the tool's order. Raises ParseError for one below no GPU."""
    found: list[MigDevice] = []
    gpu: int | None = None
    for number, line in enumerate(text.splitlines(), start=1):
        words = line.replace(":", " ").split()
        if words[:1] == ["GPU"] and len(words) > 1:
            gpu = _number(words[1])
        elif words[:1] == ["MIG"]:
            device = _number(words[3]) if len(words) > 3 and words[2] == "Device" else None
            if gpu is None or device is None or len(found) >= MAX_ROWS:
                expected = "GPU N, then lines MIG PROFILE Device N: (UUID: ...)"
                raise ParseError(_LIST, expected, line.strip()[:80], line=number)
            uuid = words[5].rstrip(")") if len(words) == 6 and words[4] == "(UUID" else None
            found.append(MigDevice(gpu, device, words[1], uuid))
    return tuple(found)


def _number(word: str) -> int | None:
    return int(word) if word.isascii() and word.isdigit() and len(word) < 6 else None
