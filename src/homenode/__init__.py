"""homenode: every vCPU, page and GPU of a virtual machine on its home NUMA node.

The names of `__all__` are the interface (docs/python.md); everything else is internal.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from homenode.api import (
        Comparison,
        Findings,
        HomenodeError,
        Host,
        Objective,
        Plan,
        PlanOptions,
        Run,
        Tuning,
        Unplannable,
        Verdict,
        compare,
        decide,
        diagnose,
        load_host,
        load_results,
        plan,
        result_rows,
        to_json,
        tune,
        verify,
    )

__version__ = "0.1.0"

__all__ = [
    "Comparison",
    "Findings",
    "HomenodeError",
    "Host",
    "Objective",
    "Plan",
    "PlanOptions",
    "Run",
    "Tuning",
    "Unplannable",
    "Verdict",
    "compare",
    "decide",
    "diagnose",
    "load_host",
    "load_results",
    "plan",
    "result_rows",
    "to_json",
    "tune",
    "verify",
]


def __getattr__(name: str) -> Any:
    """Names of the interface are loaded when they are first used: commands start without them."""
    if name not in __all__:
        raise AttributeError(f"module 'homenode' has no attribute {name!r}")
    from homenode import api

    return getattr(api, name)
