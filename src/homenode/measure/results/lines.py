"""Lines: a run as JSON lines: a head, a sample each, an end. Appended to as samples come.

The end says how many samples there are, so that a run that was cut short is never mistaken for
whole.
"""

import math

from homenode import formats
from homenode.errors import InputError
from homenode.measure.results.model import Run, RunHead, Sample

KIND = "results"
MAX_SAMPLES = 2_000_000
"""Of one run; more is no run of ours."""


def head_line(head: RunHead) -> str:
    """The first line of a run."""
    return formats.head_line(KIND, head)


def sample_line(sample: Sample) -> str:
    """The line of one sample. Fields at their defaults are left out."""
    return formats.line(sample)


def end_line(samples: int) -> str:
    """The last line: how many samples there are. A run without it was cut short."""
    return f'{{"end":{samples}}}\n'


def run_text(run: Run) -> str:
    """All lines of a run."""
    lines = [head_line(run.head), *map(sample_line, run.samples), end_line(len(run.samples))]
    return "".join(lines)


def parse_run(text: bytes, source: str) -> Run:
    """The run of these lines. Raises InputError that names the line."""
    return _whole_run(text, source) or _run_by_lines(text, source)


def _whole_run(text: bytes, source: str) -> Run | None:
    """The run where nothing is wrong, read in one step; None where something is, or may be."""
    first, last = text.find(b"\n") + 1, text.rfind(b"\n", 0, -1) + 1
    if not 0 < first <= last:
        return None
    samples = formats.plain_lines(text[first:last], Sample)
    if samples is None or len(samples) > MAX_SAMPLES or b'"end"' in text[first:last]:
        return None
    is_sound = all(
        -math.inf < one.value < math.inf and one.boot >= 0 and one.number >= 0 for one in samples
    )
    if not is_sound or text[last:] != end_line(len(samples)).encode():
        return None
    return Run(_head(text[: first - 1], source), tuple(samples))


def _run_by_lines(text: bytes, source: str) -> Run:
    lines = text.split(b"\n")
    if lines[-1]:
        raise _cut_short(source, "its last line is half-written")
    lines.pop()
    if not lines:
        raise InputError(f"{source}: expected a homenode.{KIND} head, found an empty file")
    head = _head(lines[0], source)
    end: int | None = None
    samples: list[Sample] = []
    for number, line in enumerate(lines[1:], start=2):
        if end is not None:
            raise InputError(f"{source}:{number}: expected nothing after the end, found a line")
        record = formats.decode_record(line, f"{source}:{number}")
        if "end" in record:
            end = formats.convert(record["end"], KIND, int, f"{source}:{number}")
            continue
        if len(samples) == MAX_SAMPLES:
            raise InputError(f"{source}: expected at most {MAX_SAMPLES} samples, found more")
        sample = formats.convert(record, KIND, Sample, f"{source}:{number}")
        _check(sample, f"{source}:{number}")
        samples.append(sample)
    if end is None:
        raise _cut_short(source, f"{len(samples)} samples and no end")
    if end != len(samples):
        raise InputError(f"{source}: expected {end} samples, as its end says, found {len(samples)}")
    return Run(head, tuple(samples))


def _head(line: bytes, source: str) -> RunHead:
    head = formats.decode_head(line, KIND, RunHead, source)
    if any(not _is_name(text) for text in (head.name, head.system)):
        raise InputError(
            f"{source}:1: expected a printable name and system of 1 to 200 letters, "
            f"found {head.name[:40]!r} and {head.system[:40]!r}"
        )
    return head


def _is_name(text: str) -> bool:
    return 0 < len(text) <= 200 and text.isprintable()


def _check(sample: Sample, where: str) -> None:
    if not math.isfinite(sample.value):
        raise InputError(f"{where}: expected a finite value, found {sample.value}")
    if sample.boot < 0 or sample.number < 0:
        raise InputError(
            f"{where}: expected boot and number of 0 or more, "
            f"found {sample.boot} and {sample.number}"
        )


def _cut_short(source: str, found: str) -> InputError:
    return InputError(
        f"{source}: expected a finished run, found {found}",
        hint="it was cut short, or is still running: finish it, or remove the folder",
    )
