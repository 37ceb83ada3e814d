"""Sequences simulated with the functions that trials use: layouts of known effect, noise, drift."""

import math
import random
import sys
from collections.abc import Mapping, Sequence

from homenode.decide.alternative import alternatives
from homenode.decide.sequential import look_at
from homenode.decide.verdict import Verdict, verdict
from homenode.measure.results.model import (
    Origin,
    Run,
    RunHead,
    Sample,
    SequentialPlan,
    Switches,
)
from homenode.measure.results.vantage import Vantage
from homenode.measure.schedule import seeded_order
from homenode.measure.sequence import RoundLook, SequenceEnd
from homenode.metrics import METRICS
from homenode.objective import Objective
from homenode.vm.layout import PRESETS

LAYOUTS = tuple(PRESETS)
BANDWIDTH = Objective.HOST_BANDWIDTH


def boot(
    layout: str,
    round: int,
    at: float,
    plan: SequentialPlan | None,
    values: Sequence[float],
    metric: str = "memory-bandwidth",
) -> Run:
    """One run of a trial. at: when it was measured."""
    head = RunHead(
        f"t-{layout}-{round + 1}",
        "cpu-only",
        Origin.MEASURED,
        Vantage.GUEST,
        Switches.of(PRESETS[layout]),
        host="host-1",
        boots=(f"{layout} {round}",),
        started_s=at,
        ended_s=at + 0.5,
        experiment="t",
        block=round,
        sequence=plan,
    )
    unit = "ns" if metric.endswith("latency") else "bytes_per_s"
    variant = {"memory-bandwidth": "triad", "memory-latency": "dram"}[metric]
    samples = (
        Sample(metric, unit, value, number=number, variant=variant)
        for number, value in enumerate(values)
    )
    return Run(head, tuple(samples))


def simulated(
    effects: Mapping[str, float],
    rng: random.Random,
    *,
    noise: float,
    drift: float = 0.0,
    rounds: int = 8,
    error: float = 0.05,
) -> tuple[RoundLook, list[Run]]:
    """A whole sequence. effects: how fast each layout is. noise: between boots. drift: over as many
    boots as there may be."""
    plan = SequentialPlan(error, len(effects), rounds)
    kept, runs, at = tuple(effects), list[Run](), 0
    for number in range(rounds):
        for layout in seeded_order(kept, rng.randrange(10**9), number):
            level = math.log(effects[layout]) + rng.gauss(0, noise)
            level += drift * at / (len(effects) * rounds)
            values = [1e9 * math.exp(level + rng.gauss(0, 0.003)) for _ in range(3)]
            runs.append(boot(layout, number, float(at), plan, values))
            at += 1
        kept, ended = look_at(runs, kept, BANDWIDTH)
        if ended is not None:
            break
    ended = ended or SequenceEnd.MOST_ROUNDS
    return RoundLook(rounds=number + 1, kept=kept, ended=ended), runs


MATTERS = METRICS["memory-bandwidth"].matters


def is_wrong(effects: Mapping[str, float], look: RoundLook, found: Verdict) -> bool:
    """Whether a sequence, or the verdict of its runs, rejects a layout that is as fast as the
    fastest, or has decided that one is no worse that is slower by more than matters."""
    best = max(effects.values())
    fastest = {one for one, effect in effects.items() if effect == best}
    slow = {one for one, effect in effects.items() if effect < best * (1 - MATTERS - 1e-9)}
    equal = {found.choice, *found.also} if look.ended is SequenceEnd.DECIDED else set()
    return bool(fastest - set(look.kept) or fastest & set(found.avoid) or slow & equal)


def fixed_boots(
    effects: Mapping[str, float], rng: random.Random, noise: float, drift: float, power: float
) -> int:
    """Boots of the least fixed plan that chooses the fastest layout alone as often as this."""
    fastest = max(effects, key=lambda one: effects[one])
    for rounds in range(3, 13):
        found, tried = 0, 200
        for _ in range(tried):
            runs, at = [], 0
            for number in range(rounds):
                for layout in seeded_order(effects, rng.randrange(10**9), number):
                    level = math.log(effects[layout]) + rng.gauss(0, noise)
                    level += drift * at / (len(effects) * 8)
                    values = [1e9 * math.exp(level + rng.gauss(0, 0.003)) for _ in range(3)]
                    runs.append(boot(layout, number, float(at), None, values))
                    at += 1
            one = verdict("", alternatives(runs), BANDWIDTH)
            found += one.choice == fastest and not one.also and len(one.avoid) == len(effects) - 1
        if found >= power * tried:
            return rounds * len(effects)
    return 12 * len(effects)


def equal_rows(count: int, layouts: int) -> None:
    """Print the rows of equal layouts of docs/decisions/0023-sequential-trials.md."""
    rng, equal = random.Random(layouts), dict.fromkeys(LAYOUTS[:layouts], 1.0)
    for noise in (0.01, 0.03, 0.05):
        for drift in (0.0, 0.1):
            wrong = boots = 0
            for _ in range(count):
                look, runs = simulated(equal, rng, noise=noise, drift=drift)
                wrong += is_wrong(equal, look, verdict("", alternatives(runs), BANDWIDTH))
                boots += len(runs)
            print(f"{layouts} equal, noise {noise:.0%}, drift {drift:.0%}: ", end="")
            print(f"wrong {wrong / count:.2%}, {boots / count:.1f} boots", flush=True)


def unequal_row(count: int, layouts: int, gain: float, noise: float) -> None:
    """Print a row of one layout that is faster, next to the fixed plan of the same power."""
    rng = random.Random(f"{layouts} {gain} {noise}")
    effects = dict.fromkeys(LAYOUTS[:layouts], 1.0) | {LAYOUTS[1]: gain}
    wrong = boots = alone = 0
    for _ in range(count):
        look, runs = simulated(effects, rng, noise=noise, drift=0.05)
        found = verdict("", alternatives(runs), BANDWIDTH)
        wrong += is_wrong(effects, look, found)
        alone += look.kept == (LAYOUTS[1],) and found.choice == LAYOUTS[1]
        boots += len(runs)
    fixed = fixed_boots(effects, rng, noise, 0.05, min(0.97, alone / count))
    print(f"{layouts}, one {gain:.2f} x, noise {noise:.0%}: alone {alone / count:.1%}, ", end="")
    print(f"wrong {wrong / count:.2%}, {boots / count:.1f} boots; fixed {fixed}", flush=True)


GAINS = ((1.06, 0.01), (1.1, 0.03), (1.2, 0.03), (2.5, 0.03), (1.3, 0.05))


if __name__ == "__main__":
    for number in map(int, sys.argv[2:]):
        equal_rows(int(sys.argv[1]), number)
    for number in map(int, sys.argv[2:]):
        for one_gain, one_noise in GAINS:
            unequal_row(int(sys.argv[1]) // 5, number, one_gain, one_noise)
