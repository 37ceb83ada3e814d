"""Damage for parsers: seeded, so that a failure comes back."""

import os
import random
import re
from collections.abc import Callable, Iterator

from homenode.errors import InputError

MUTATIONS = int(os.environ.get("HOMENODE_FUZZ_MUTATIONS", "200"))
"""Mutations of each sample of a tool's output; `make nightly` asks for more."""

SEED = int(os.environ.get("HOMENODE_SEED", "1"))

_SNIPPETS = (
    "",
    " ",
    "\n",
    "\t",
    "\0",
    *"-1 N/A 999999999999999999999 0x , - < > & \x1b[4m é ² ٣ \ud800".split(),
    *"<inactive> GPU0 X ]]> =====".split(),
    "<!ENTITY a 'b'>",
)


def mutations(text: str, count: int, seed: int = SEED) -> Iterator[str]:
    """Texts with a few places cut, doubled, exchanged or overwritten."""
    rng = random.Random(seed)
    for _ in range(count):
        damaged = text
        for _ in range(rng.randint(1, 4)):
            at = rng.randrange(len(damaged) + 1)
            end = min(len(damaged), at + rng.choice((0, 1, 1, 2, 5, 20, 200)))
            middle = rng.choice((rng.choice(_SNIPPETS), damaged[at:end] * 2, ""))
            damaged = damaged[:at] + middle + damaged[end:]
        if rng.random() < 0.2:
            lines = damaged.split("\n")
            rng.shuffle(lines)
            damaged = "\n".join(lines)
        if rng.random() < 0.1:
            damaged = damaged[: rng.randrange(len(damaged) + 1)]
        yield damaged


def survives(parse: Callable[[str], object], text: str, count: int = 400) -> int:
    """How many damaged texts still parse; anything but a result or an InputError is raised."""
    parsed = 0
    for damaged in mutations(text, count):
        try:
            parse(damaged)
        except InputError as error:
            assert re.search("expected|missing|rejected|unknown|out of range", error.message)
        else:
            parsed += 1
    return parsed
