"""Gap: something that we could not learn, and why."""

from msgspec import Struct


class Gap(Struct, frozen=True, order=True):
    """One unknown. A value that is None somewhere has its reason in a gap.

    subject: what is unknown, in the user's words ("node 1 free memory", "0000:17:00.0 node").
    reason:  why ("/sys/.../numa_node says -1", "lstopo XML holds no link state").
    """

    subject: str
    reason: str

    def __str__(self) -> str:
        return f"{self.subject}: {self.reason}"
