"""Rules: what a VM has to do with other VMs, and other types of options of pools."""

from enum import StrEnum
from typing import Annotated

from msgspec import Struct

from homenode.opt import Opt


class Rules(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What a VM has to do with other VMs: names of groups; None = no group.

    affinity: the group is on one host. anti_affinity: no two VMs of the group are on one host.
    fault_domains: no two are in one fault domain.
    """

    affinity: Annotated[str | None, Opt("--affinity", "GROUP", rare=True)] = None
    anti_affinity: Annotated[str | None, Opt("--anti-affinity", "GROUP")] = None
    fault_domains: Annotated[str | None, Opt("--fault-domains", "GROUP", rare=True)] = None

    @property
    def is_free(self) -> bool:
        return self == Rules()


NO_RULES = Rules()


class Availability(StrEnum):
    """Whether a host takes VMs: only an open one does. gone: it left the pool for good."""

    OPEN = "open"
    CORDONED = "cordoned"
    DRAINING = "draining"
    GONE = "gone"
