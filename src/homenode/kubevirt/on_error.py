"""OnError: what becomes of a VM whose devices could not be placed."""

from enum import StrEnum


class OnError(StrEnum):
    """Names of the policies, as options and annotations spell them."""

    FAIL = "fail"  # it does not start, and KubeVirt tries again
    PASSTHROUGH = "passthrough"  # it starts as KubeVirt made it
