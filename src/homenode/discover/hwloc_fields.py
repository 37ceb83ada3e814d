"""hwloc fields: attributes of hwloc objects as numbers and sets of PUs."""

from homenode.cpuset import CpuSet
from homenode.errors import ParseError
from homenode.tools.hwloc_xml import HwlocObject


def pus_of(obj: HwlocObject, attribute: str, source: str) -> CpuSet:
    """The PUs of an attribute such as cpuset; empty where it is absent. Raises ParseError."""
    text = obj.attributes.get(attribute)
    return CpuSet() if text is None else CpuSet.parse_mask(text, f"{source}: {attribute}")


def os_index(obj: HwlocObject, source: str) -> int:
    """The OS index of an object that must have one. Raises ParseError."""
    index = number(obj.attributes.get("os_index"))
    if index is None:
        raise ParseError(source, f"{obj.type} with an os_index", str(obj.attributes))
    return index


def number(text: str | None) -> int | None:
    """The whole number of a text; None where there is none."""
    if text is None or not (text.isascii() and text.isdigit() and len(text) <= 20):
        return None
    return int(text)
