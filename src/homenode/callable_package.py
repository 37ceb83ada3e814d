"""CallablePackage: a package that can be called, so that `homenode.plan` is both.

The interface has functions whose names are packages' (plan, verify). Python gives a package's name
to the package once any of its modules is imported; so the package itself carries out the call.
"""

import sys
from types import ModuleType
from typing import Any


class CallablePackage(ModuleType):
    """Calls the function of homenode.api that has the package's last name."""

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        from homenode import api

        return getattr(api, self.__name__.rpartition(".")[2])(*arguments, **options)


def make_callable(name: str) -> None:
    """Let a package that is being imported be called."""
    sys.modules[name].__class__ = CallablePackage
