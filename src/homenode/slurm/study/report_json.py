"""Study report JSON: docs/formats/slurm-study.md. Bytes, seconds and ns, as inside the program."""

from typing import Any

import msgspec

from homenode.bdf import PciAddress
from homenode.cpuset import CpuSet
from homenode.slurm.study.report import FORMAT, StudyReport


def report_json(report: StudyReport) -> str:
    """The document of a report."""
    fields = {name: getattr(report, name) for name in report.__dataclass_fields__}
    builtins = msgspec.to_builtins({"format": FORMAT, **fields}, enc_hook=_to_text)
    return msgspec.json.format(msgspec.json.encode(builtins), indent=2).decode() + "\n"


def _to_text(value: Any) -> str:
    if isinstance(value, CpuSet | PciAddress):
        return str(value)
    raise NotImplementedError(f"no text for {type(value).__name__}")
