"""How often equal layouts are told apart, and unequal ones found, by `compare`, in per cent.

    .venv/bin/python -m tests.error_rates [DRAWS [PART OF A ROW'S NAME]]

Boots vary by 1 %, ten samples of each by 1 %, unless a row says otherwise; drift is linear over the
whole trial. Tables: docs/developer/statistics.md.
"""

import math
import random
import sys
from collections.abc import Callable, Sequence
from functools import partial

from homenode.decide.alternative import group_runs
from homenode.decide.compare import compare
from homenode.decide.comparison import Outcome
from homenode.measure.results.model import Origin, Run, RunHead, Sample, Switches
from homenode.measure.results.vantage import Vantage
from homenode.vm.layout import PRESETS

LAYOUTS = ("default", "pin", "pin-numa", "pin-numa-pci")
SAMPLES = 10
Order = Callable[[random.Random], Sequence[int]]


def fixed(text: str) -> Order:
    return lambda rng: [ord(one) - ord("A") for one in text]


def blocks(boots: int, layouts: int = 2) -> Order:
    """Each layout once in each round, in random order."""
    return lambda rng: [one for _ in range(boots) for one in rng.sample(range(layouts), layouts)]


def mixed(boots: int) -> Order:
    """Any order."""
    return lambda rng: rng.sample([0, 1] * boots, 2 * boots)


def found(
    rng: random.Random,
    order: Order,
    *,
    rounds: bool = False,
    drift: float = 0.0,
    gain: float = 0.0,
    noise: Sequence[float] = (0.01, 0.01, 0.01, 0.01),
) -> bool:
    """Whether any layout is said to differ from the first. gain: of the last layout."""
    places = order(rng)
    runs, seen = [], dict.fromkeys(range(len(LAYOUTS)), 0)
    for place, layout in enumerate(places):
        level = 100e9 * (1 + drift * place / max(1, len(places) - 1))
        level *= (1 + gain) if layout == max(places) else 1.0
        level *= math.exp(rng.gauss(0, noise[layout]))
        name, round_of = f"{LAYOUTS[layout]}-{seen[layout]}", seen[layout]
        seen[layout] += 1
        head = RunHead(
            name,
            "gpu",
            Origin.MEASURED,
            Vantage.GUEST,
            Switches.from_layout(PRESETS[LAYOUTS[layout]]),
            host_kind="kind",
            host="host",
            boots=(name,),
            started_s=1.7e9 + 600.0 * place,
            experiment="trial" if rounds else None,
            block=round_of if rounds else None,
        )
        samples = tuple(
            Sample(
                "memory-bandwidth",
                "bytes_per_s",
                level * math.exp(rng.gauss(0, 0.01)),
                number=number,
                variant="triad",
            )
            for number in range(SAMPLES)
        )
        runs.append(Run(head, samples))
    runs.sort(key=lambda run: run.head.switches.name)
    effects = compare(group_runs(runs)).effects
    return any(one.primary and one.outcome in (Outcome.BETTER, Outcome.WORSE) for one in effects)


_DRIFTING = (
    ("A A B A B B", fixed("AABABB"), False),
    ("A B A B A B", fixed("ABABAB"), False),
    ("A B A B A B in rounds", fixed("ABABAB"), True),
    ("three rounds", blocks(3), True),
    ("any order", mixed(3), False),
)
ROWS: dict[str, Callable[[random.Random], bool]] = {
    "equal, three rounds": partial(found, order=blocks(3), rounds=True),
    "5 % better, three rounds": partial(found, order=blocks(3), rounds=True, gain=0.05),
    "2 % better, three rounds": partial(found, order=blocks(3), rounds=True, gain=0.02),
    "equal, any order": partial(found, order=mixed(3)),
    "5 % better, any order": partial(found, order=mixed(3), gain=0.05),
    "equal, five rounds": partial(found, order=blocks(5), rounds=True),
    "equal, four layouts": partial(found, order=blocks(3, 4), rounds=True),
    "5 % better, four layouts": partial(found, order=blocks(3, 4), rounds=True, gain=0.05),
    **{
        f"equal, {kind}, {drift:.0%} drift": partial(found, order=order, rounds=rounds, drift=drift)
        for kind, order, rounds in _DRIFTING
        for drift in (0.0, 0.02, 0.05, 0.10)
    },
    **{
        f"5 % better, {kind}, 10 % drift": partial(
            found, order=order, rounds=rounds, drift=0.10, gain=0.05
        )
        for kind, order, rounds in (
            ("three rounds", blocks(3), True),
            ("any order", mixed(3), False),
            ("four layouts", blocks(3, 4), True),
        )
    },
    **{
        f"equal, one side {times} times noisier": partial(
            found, order=blocks(3), rounds=True, noise=(0.01, 0.01 * times)
        )
        for times in (3, 5, 10)
    },
}


def share(name: str, draws: int) -> float:
    """Share of a row's comparisons in which layouts are told apart."""
    rng = random.Random(name)
    return sum(ROWS[name](rng) for _ in range(draws)) / draws


def main() -> None:
    draws = int(sys.argv[1]) if len(sys.argv) > 1 else 2000
    wanted = sys.argv[2] if len(sys.argv) > 2 else ""
    for name in ROWS:
        if wanted in name:
            print(f"{share(name, draws):6.1%}  {name}", flush=True)


if __name__ == "__main__":
    main()
