"""Gates: the feature gates that are on in a cluster's KubeVirt CR.

Source: kubevirt.io/v1, KubeVirtConfiguration.developerConfiguration.featureGates.
"""

from homenode.errors import InputError
from homenode.pods.objects import down, read_object


def read_gates(text: str | bytes, source: str) -> frozenset[str]:
    """The gates of a KubeVirt CR as JSON, or of a list of one. Raises InputError."""
    document = read_object(text, source, "a KubeVirt CR")
    items = document.get("items")
    cr = items[0] if isinstance(items, list) and len(items) == 1 else document
    kind = down(cr, "kind")
    if kind != "KubeVirt":
        raise InputError(
            f"{source}: expected one object of kind KubeVirt, found {kind!r}",
            hint="try: kubectl get kubevirt -A -o json",
        )
    gates = down(cr, "spec", "configuration", "developerConfiguration", "featureGates")
    return frozenset(gate for gate in gates or () if isinstance(gate, str))
