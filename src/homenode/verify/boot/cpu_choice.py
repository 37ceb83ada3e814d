"""CpuChoice: the CPU model of a test guest, and what a substituted one can no longer tell.

Seen with QEMU 7.2: under TCG the models Skylake-Server and its Intel kin give siblings, dies and
one L3 a die as under KVM; AMD models and `max` give no siblings.
"""

import re
from dataclasses import dataclass

from homenode.domain.document import Document

SUBSTITUTE = "Skylake-Server"
_INTEL = tuple(
    """
    Nehalem Westmere SandyBridge IvyBridge Haswell Broadwell Skylake Cascadelake Cooperlake
    Icelake Snowridge SapphireRapids GraniteRapids SierraForest Denverton KnightsMill
""".split()
)
_L3 = ("emulate", "passthrough", "disable")
_SAFE = re.compile(r"[A-Za-z0-9_.-]{1,64}\Z", re.ASCII)


@dataclass(frozen=True, slots=True)
class CpuChoice:
    """A test guest's <cpu>. mode: "custom" with a model, "host-passthrough" or "maximum".

    features: (name, on). l3: None = the model's own; "emulate", "passthrough" or "disable".
    substituted: why siblings and LLCs say nothing of the real guest; None where they do.
    """

    mode: str
    model: str | None
    features: tuple[tuple[str, bool], ...]
    l3: str | None
    substituted: str | None


def choose_cpu(document: Document, *, kvm: bool) -> CpuChoice:
    """The document's own <cpu> where this machine can run it, else an Intel model with SMT."""
    cpu = document.root.child("cpu")
    mode = None if cpu is None else cpu.get("mode") or ("custom" if cpu.child("model") else None)
    name = document.root.at("cpu", "model")
    model = None if name is None else name.text.strip()
    cache = document.root.at("cpu", "cache")
    l3 = None if cache is None else cache.get("mode")
    if l3 not in _L3:
        l3 = None
    features = tuple(
        (feature.get("name") or "", feature.get("policy") not in ("disable", "forbid"))
        for feature in (() if cpu is None else cpu.all("feature"))
        if _SAFE.match(feature.get("name") or "")
    )
    emulated = document.root.get("type") == "qemu"
    if mode == "custom" and model is not None and _SAFE.match(model):
        if kvm or emulated or model.startswith(_INTEL):
            return CpuChoice(mode, model, features, _of_any_model(l3), None)
        why = f"model substituted: {SUBSTITUTE} for {model}, which gives no siblings without KVM"
        return _substitute(l3, why)
    if kvm and mode in ("host-passthrough", "host-model", "maximum"):
        return CpuChoice("host-passthrough", None, features, l3, None)
    if emulated and mode == "maximum":
        return CpuChoice(mode, None, features, l3, None)
    stated = mode or "the default model"
    why = f"model substituted: {SUBSTITUTE} for {stated}" + ("" if kvm else ", which needs KVM")
    return _substitute(l3, why)


def _substitute(l3: str | None, why: str) -> CpuChoice:
    return CpuChoice("custom", SUBSTITUTE, (), _of_any_model(l3), why)


def _of_any_model(l3: str | None) -> str | None:
    """The host's caches are passed through with host-passthrough only."""
    return None if l3 == "passthrough" else l3
