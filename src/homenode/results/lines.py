"""Lines: a run as JSON lines: a head, a sample each, an end. Appended to as samples come.

The end says how many samples there are, so that a run that was cut short is never taken for whole.
"""

import math
from collections.abc import Iterable
from functools import cache, lru_cache
from typing import Any, TypeVar

import msgspec

from homenode.bdf import Bdf
from homenode.cpuset import CpuSet
from homenode.errors import HomenodeError, InputError
from homenode.formats import VERSIONS
from homenode.results.model import Run, RunHead, Sample

T = TypeVar("T")

KIND = "results"
MAX_SAMPLES = 2_000_000
"""Of one run; more is no run of ours."""


def head_line(head: RunHead) -> str:
    """The first line of a run."""
    return _line({"format": f"homenode.{KIND}/{VERSIONS[KIND]}", **_fields(head)})


def sample_line(sample: Sample) -> str:
    """The line of one sample. Fields at their defaults are left out."""
    return _line(_fields(sample))


def end_line(samples: int) -> str:
    """The last line: how many samples there are. A run without it was cut short."""
    return _line({"end": samples})


def run_text(run: Run) -> str:
    """All lines of a run."""
    lines = [head_line(run.head), *map(sample_line, run.samples), end_line(len(run.samples))]
    return "".join(lines)


def parse_run(text: bytes, source: str, *, unfinished: bool = False) -> Run:
    """The run of these lines.

    unfinished: take what is there of a run that was cut short, without a half-written last line;
    for resuming it, and for nothing else. Raises InputError that names the line.
    """
    lines = text.split(b"\n")
    if lines[-1] and not unfinished:
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
        sample = _plain(line)
        record = {} if sample is not None else _record(line, f"{source}:{number}")
        if "end" in record:
            end = _convert(record["end"], int, f"{source}:{number}")
            continue
        if len(samples) == MAX_SAMPLES:
            raise InputError(f"{source}: expected at most {MAX_SAMPLES} samples, found more")
        sample = sample or _convert(record, Sample, f"{source}:{number}")
        _check(sample, f"{source}:{number}")
        samples.append(sample)
    if end is None and not unfinished:
        raise _cut_short(source, f"{len(samples)} samples and no end")
    if end is not None and end != len(samples):
        raise InputError(f"{source}: expected {end} samples, as its end says, found {len(samples)}")
    return Run(head, tuple(samples))


def _plain(line: bytes) -> Sample | None:
    """The sample of a line as we write them, in one step; None for any other line.

    A long run is read three times as fast; what is wrong with a line is found in the slower way.
    """
    if not line.startswith(b'{"metric"') or b'"end"' in line:
        return None
    try:
        return _decoder().decode(line)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, HomenodeError):
        return None


@cache
def _decoder() -> msgspec.json.Decoder[Sample]:
    return msgspec.json.Decoder(Sample, dec_hook=_from_text)


def _head(line: bytes, source: str) -> RunHead:
    record = _record(line, f"{source}:1")
    found = record.get("format")
    name, _, version = found.partition("/") if isinstance(found, str) else ("", "", "")
    if name != f"homenode.{KIND}" or not (version.isascii() and version.isdigit()):
        raise InputError(
            f'{source}:1: expected "format": "homenode.{KIND}/{VERSIONS[KIND]}", found {found!r}'
        )
    if len(version) > 6 or int(version) > VERSIONS[KIND]:
        raise InputError(
            f"{source}: expected homenode.{KIND} up to version {VERSIONS[KIND]}, found {version}",
            hint="it was written by a newer homenode: update this one",
        )
    head = _convert(record, RunHead, f"{source}:1")
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


def _record(line: bytes, where: str) -> dict[str, Any]:
    try:
        record = msgspec.json.decode(line)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InputError(f"{where}: expected a line of JSON, found: {error}") from None
    if not isinstance(record, dict):
        raise InputError(f"{where}: expected a JSON object, found {type(record).__name__}")
    return record


def _convert(record: object, of: type[T], where: str) -> T:
    try:
        return msgspec.convert(record, of, dec_hook=_from_text)
    except (msgspec.ValidationError, HomenodeError) as error:
        raise InputError(f"{where}: expected a line of homenode.{KIND}, found: {error}") from None


def _cut_short(source: str, found: str) -> InputError:
    return InputError(
        f"{source}: expected a finished run, found {found}",
        hint="it was cut short, or is still running: finish it, or remove the folder",
    )


def _fields(value: RunHead | Sample) -> dict[str, Any]:
    """Fields that differ from their defaults."""
    fields: Iterable[Any] = value.__dataclass_fields__.values()
    return {
        field.name: getattr(value, field.name)
        for field in fields
        if getattr(value, field.name) != field.default
    }


def _line(record: dict[str, Any]) -> str:
    builtins = msgspec.to_builtins(record, enc_hook=_to_text)
    return msgspec.json.encode(builtins).decode() + "\n"


def _to_text(value: Any) -> str:
    if isinstance(value, CpuSet | Bdf):
        return str(value)
    raise NotImplementedError(f"no text for {type(value).__name__}")


def _from_text(of: type, value: Any) -> Any:
    if isinstance(value, str) and of in (CpuSet, Bdf):
        return _parsed(of, value)
    raise NotImplementedError(f"no {of.__name__} of {type(value).__name__}")


@lru_cache(4096)
def _parsed(of: Any, text: str) -> Any:
    """A set of PUs or an address: a run has few of them, many times each."""
    return of.parse(text)
