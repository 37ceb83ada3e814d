"""DocumentLines: the line of a domain document that a finding is about, as its source.

Findings name what they are about in the user's words ("vCPUs 3-4", "<emulatorpin>", "cell 1", an
address); the element with that name is looked up here, in one place for all of them.
"""

import re
from collections.abc import Iterator

from msgspec.structs import replace

from homenode.bdf import Bdf
from homenode.cpuset import CpuSet
from homenode.errors import HomenodeError
from homenode.findings import Finding
from homenode.vm.domain.document import Document, Element
from homenode.vm.domain.fields import host_address

_TAG = re.compile(r"<(\w[\w:-]*)>")
_VCPUS = re.compile(r"\bvCPUs? (\d[\d,-]*)")
_CELLS = re.compile(r"\bcells? (\d[\d,-]*)")
_IOTHREAD = re.compile(r"\bIOThread (\d+)")
_ADDRESS = re.compile(r"\b[0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]\b")


class DocumentLines:
    """The lines of a document's pins, cells, devices and other elements."""

    __slots__ = ("_cells", "_devices", "_iothreads", "_pins", "_source", "_tags")

    def __init__(self, document: Document) -> None:
        self._source = document.source
        self._tags: dict[str, int] = {}
        self._pins: dict[int, int] = {}
        self._cells: dict[int, int] = {}
        self._iothreads: dict[int, int] = {}
        self._devices: dict[Bdf, int] = {}
        cells = 0
        for element in document.root.walk():
            self._tags.setdefault(element.name, element.line)
            if element.name == "vcpupin":
                _keep(self._pins, element, "vcpu")
            elif element.name == "iothreadpin":
                _keep(self._iothreads, element, "iothread")
            elif element.name == "cell":
                self._cells.setdefault(_number(element.get("id"), cells), element.line)
                cells += 1
        for bdf, line in _devices(document):
            self._devices.setdefault(bdf, line)

    def line_of(self, subject: str) -> int | None:
        """The line of the first thing that a subject names; None where it names nothing here."""
        if (device := _ADDRESS.search(subject)) is not None:
            return self._devices.get(Bdf.parse(device[0]))
        if (tag := _TAG.search(subject)) is not None:
            return self._tags.get(tag[1])
        for pattern, lines, otherwise in (
            (_VCPUS, self._pins, "vcpu"),
            (_CELLS, self._cells, "cell"),
            (_IOTHREAD, self._iothreads, "iothreads"),
        ):
            if (numbers := pattern.search(subject)) is not None:
                first = next(iter(CpuSet.parse(numbers[1].rstrip(",-"), "subject")), -1)
                return lines.get(first, self._tags.get(otherwise))
        return None

    def located(self, finding: Finding) -> Finding:
        """The finding with "file:line" as its source, where it is about this document."""
        if finding.source != self._source:
            return finding
        line = self.line_of(finding.subject)
        return finding if line is None else replace(finding, source=f"{self._source}:{line}")


def _keep(lines: dict[int, int], element: Element, attribute: str) -> None:
    number = _number(element.get(attribute), -1)
    if number >= 0:
        lines.setdefault(number, element.line)


def _number(text: str | None, otherwise: int) -> int:
    return int(text) if text is not None and text.isascii() and text.isdigit() else otherwise


def _devices(document: Document) -> Iterator[tuple[Bdf, int]]:
    devices = document.root.child("devices")
    for element in () if devices is None else devices.children:
        source = element.at("source", "address") if element.name == "hostdev" else None
        if source is None or element.get("type") != "pci":
            continue
        try:
            yield host_address(document, source), element.line
        except HomenodeError:  # what cannot be read has been said by whoever reads the document
            continue
