"""Speed of a report: 1,000 runs as they come from the suite, to a page, with its peak memory.

    bench/report_speed.py [RUNS]

The runs are made up around round figures; five layouts of ten machines.
"""

import math
import random
import resource
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from homenode.bdf import Bdf
from homenode.measure.results.model import Origin, Run, RunHead, Sample, Switches
from homenode.measure.results.store import write_run
from homenode.measure.results.vantage import Vantage
from homenode.show.html import render_page
from homenode.show.report.document import build_report
from homenode.show.report.inputs import gather
from homenode.show.report.machine import build_machines
from homenode.vm.layout import PRESETS

LAYOUTS = ("default", "pin", "pin-numa", "pin-numa-smt", "pin-numa-pci")
MACHINES = 10
BOOTS, REPEATS = 3, 5


def made_up(number: int, rng: random.Random) -> Run:
    """One run: every metric of the suite, some 1,300 samples."""
    layout = LAYOUTS[number // MACHINES % len(LAYOUTS)]
    machine = number % MACHINES
    head = RunHead(
        f"{layout}-{number}",
        f"GPU {machine}",
        Origin.MEASURED,
        Vantage.GUEST,
        Switches.from_layout(PRESETS[layout]),
        host_kind=f"kind {machine}",
        host=f"host-{machine}",
        vcpus=64,
        host_addresses=True,
    )
    return Run(head, tuple(samples(rng)))


def samples(rng: random.Random) -> Iterator[Sample]:
    for boot in range(BOOTS):
        for n in range(REPEATS):
            at = {"boot": boot, "number": n}

            def noisy(value: float) -> float:
                return value * math.exp(rng.gauss(0, 0.01))

            for kernel in ("copy", "scale", "add", "triad"):
                yield Sample("memory-bandwidth", "bytes_per_s", noisy(5e11), variant=kernel, **at)
            for power in range(12, 30):
                yield Sample("memory-latency", "ns", noisy(power), size_bytes=1 << power, **at)
            yield Sample("memory-latency", "ns", noisy(100), variant="dram", **at)
            for power in range(3, 31):
                yield Sample(
                    "allreduce-busbw",
                    "bytes_per_s",
                    noisy(1e9 * power),
                    size_bytes=1 << power,
                    **at,
                )
            yield Sample("allreduce-busbw-peak", "bytes_per_s", noisy(2e10), **at)
            yield Sample("cpu-throughput", "events_per_s", noisy(2e5), **at)
            yield Sample("cpu-single", "events_per_s", noisy(3e3), **at)
            for bus in range(8):
                for node in range(2):
                    for metric in ("h2d-bandwidth", "d2h-bandwidth"):
                        yield Sample(
                            metric,
                            "bytes_per_s",
                            noisy(5e10),
                            device=Bdf(0, bus + 1, 0, 0),
                            node=node,
                            **at,
                        )


def main() -> None:
    count = int(sys.argv[1]) if len(sys.argv) > 1 else 1000
    rng = random.Random(20261120)
    with tempfile.TemporaryDirectory() as directory:
        for number in range(count):
            write_run(Path(directory), made_up(number, rng))
        start, processor = time.perf_counter(), time.process_time()
        found = gather([directory], [])
        read = time.perf_counter()
        machines = build_machines(found.runs, found.stored, found.hosts)
        analysed = time.perf_counter()
        page = render_page(build_report(machines, found.skipped, "now"))
        end, processor = time.perf_counter(), time.process_time() - processor
    samples_read = sum(len(run.samples) for run in found.runs)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(f"{count} runs, {samples_read:,} samples, {len(page) / 1e6:.1f} MB page")
    parts = (("read", read - start), ("analysed", analysed - read), ("drawn", end - analysed))
    print(", ".join(f"{name} {seconds:.1f} s" for name, seconds in parts))
    print(f"in all {end - start:.1f} s ({processor:.2f} s of a processor), at most {peak:.0f} MiB")


if __name__ == "__main__":
    main()
