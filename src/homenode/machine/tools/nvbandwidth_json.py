"""nvbandwidth -j: see nvbandwidth for the tool.

    {
    \t"nvbandwidth" :
    \t{
    \t\t"testcases" : [ {"name" : ..., "status" : "Passed",
    \t\t                  "bandwidth_matrix" : [["55.31", "N/A"]]} ]

Cells are texts with six significant digits.
"""

import re
from typing import Any

from homenode.errors import ParseError
from homenode.gap import Gap
from homenode.machine.tools.figures import figure_or_none
from homenode.machine.tools.json_documents import embedded
from homenode.machine.tools.nvbandwidth_records import (
    MAX_DEVICES,
    SCALES,
    SOURCE,
    TWO_WAYS,
    NvbandwidthDevice,
    NvbandwidthMatrix,
    NvbandwidthRun,
    NvbandwidthTest,
    Status,
    bdf_of,
    merged,
    unit_of,
)

_STATUSES = {
    "Passed": Status.PASSED,
    "Waived": Status.WAIVED,
    "Running": Status.INCOMPLETE,
    "Error": Status.FAILED,
    "Failed": Status.FAILED,
    "Not Found": Status.FAILED,  # a name that this version does not know
}
# "0: NVIDIA H200 (00000000:19:00): (node01)": the host's name is not kept.
_DEVICE = re.compile(r"(\d{1,4}): (.+?) \(([0-9a-fA-F:.]+)\)(?::.*)?", re.ASCII)
_KEYS = {
    "CUDA Runtime Version",
    "CUDA Driver Version",
    "Driver Version",
    "GPU Device list",
    "git_version",
    "testcases",
    "version",
    "error",
    "warning",
    "bufferSize",
    "testSamples",
    "useMean",
}


def parse_json(text: str) -> NvbandwidthRun:
    """The one run of an output. Documents that follow each other are one run. Raises ParseError."""
    tests: list[NvbandwidthTest] = []
    errors: list[str] = []
    gaps: list[Gap] = []
    devices: tuple[NvbandwidthDevice, ...] = ()
    head: dict[str, Any] = {}
    for document in embedded(text, SOURCE):
        root = document.get("nvbandwidth")
        if not isinstance(root, dict):
            gaps.append(Gap(SOURCE, f"a document without nvbandwidth: {sorted(document)[:5]}"))
            continue
        head = {**root, **head}
        for key in ("error", "warning"):
            if isinstance(said := root.get(key), str) and said:
                errors.append(said[:400])
        gaps += [Gap(SOURCE, f"key not known: {key[:80]!r}") for key in set(root) - _KEYS]
        devices = _devices(root.get("GPU Device list", [])) or devices
        tests += [_test(entry) for entry in _list(root.get("testcases", []), "testcases")]
    if not head:
        raise ParseError(SOURCE, 'a JSON object with "nvbandwidth"', "none")
    version = head.get("version")
    if not isinstance(version, str):
        raise ParseError(SOURCE, "a version", str(version))
    driver = head.get("Driver Version")
    if not tests and not errors:
        raise ParseError(SOURCE, "tests", "none")
    return NvbandwidthRun(
        version,
        driver if isinstance(driver, str) else None,
        devices,
        merged(tests),
        tuple(errors),
        tuple(sorted(gaps)),
    )


def _test(entry: Any) -> NvbandwidthTest:
    if not isinstance(entry, dict):
        raise ParseError(SOURCE, "a test case", type(entry).__name__)
    name, said = entry.get("name"), entry.get("status")
    if not isinstance(name, str) or not isinstance(said, str) or said not in _STATUSES:
        raise ParseError(
            SOURCE, f"a test's name and a status of {', '.join(_STATUSES)}", f"{name}, {said}"
        )
    status = _STATUSES[said]
    if status is not Status.PASSED:
        return NvbandwidthTest(name, status, ())
    description = entry.get("bandwidth_description")
    if not isinstance(description, str):
        raise ParseError(SOURCE, f"{name}: a description", str(description))
    return NvbandwidthTest(name, status, _matrices(name, description, entry))


def _matrices(name: str, description: str, entry: dict[str, Any]) -> tuple[NvbandwidthMatrix, ...]:
    unit = unit_of(description)
    rows = [
        _row(name, row, SCALES[unit]) for row in _list(entry.get("bandwidth_matrix"), f"{name}")
    ]
    columns = len(rows[0]) if rows else 0
    if not 0 < columns <= MAX_DEVICES or not all(len(row) == columns for row in rows):
        raise ParseError(SOURCE, f"{name}: rows of equal length", f"{[len(r) for r in rows][:9]}")
    # Rows and columns are the same GPUs; three times as many rows are three matrices.
    is_two_ways = "device_to_device_bidirectional" in name and len(rows) == 3 * columns
    parts: tuple[str | None, ...] = _parts(name) if is_two_ways else (None,)
    height = len(rows) // len(parts)
    return tuple(
        NvbandwidthMatrix(
            part,
            description,
            unit,
            tuple(str(n) for n in range(height)),
            tuple(str(n) for n in range(columns)),
            tuple(rows[at * height : (at + 1) * height]),
        )
        for at, part in enumerate(parts)
    )


def _parts(name: str) -> tuple[str, ...]:
    if "_write_" in name:
        return tuple(part.replace("read", "write") for part in TWO_WAYS)
    return TWO_WAYS


def _row(name: str, row: Any, scale: float) -> tuple[float | None, ...]:
    cells = []
    for cell in _list(row, f"{name}: rows"):
        if not isinstance(cell, str):
            raise ParseError(SOURCE, f"{name}: cells that are texts", str(cell)[:40])
        value = figure_or_none(cell, SOURCE, f"{name}: a number or N/A")
        cells.append(None if value is None else value * scale)
    return tuple(cells)


def _devices(entries: Any) -> tuple[NvbandwidthDevice, ...]:
    devices = []
    for entry in _list(entries, "GPU Device list"):
        found = _DEVICE.fullmatch(entry) if isinstance(entry, str) else None
        if found is None:
            raise ParseError(SOURCE, "'0: NAME (00000000:19:00)'", str(entry)[:80])
        devices.append(NvbandwidthDevice(int(found[1]), found[2], bdf_of(found[3])))
    return tuple(devices)


def _list(value: Any, what: str) -> list[Any]:
    if not isinstance(value, list):
        raise ParseError(SOURCE, f"{what}: a list", type(value).__name__)
    return value
