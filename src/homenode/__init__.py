"""homenode: every vCPU, page and GPU of a virtual machine on its home NUMA node.

The names of `__all__` are the interface (docs/python.md); everything else is internal.
"""

import sys
from types import ModuleType
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


class _CallablePackage(ModuleType):
    """A package whose name is also a function's of the interface: homenode.plan, homenode.verify.

    Python gives the name to the package once any module of it is imported; so it can be called.
    """

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        return getattr(_api(), self.__name__.rpartition(".")[2])(*arguments, **options)


class _Package(ModuleType):
    def __setattr__(self, name: str, value: Any) -> None:
        if name in __all__ and isinstance(value, ModuleType):
            value.__class__ = _CallablePackage
        super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package


def _api() -> Any:
    from homenode import api

    return api


def __getattr__(name: str) -> Any:
    """Names of the interface are loaded when they are first used: commands start without them."""
    if name not in __all__:
        raise AttributeError(f"module 'homenode' has no attribute {name!r}")
    return getattr(_api(), name)
