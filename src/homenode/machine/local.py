"""LocalMachine: the one that homenode runs on. [I/O]"""

from collections.abc import Collection, Mapping, Sequence

from homenode.process import Completed, find_program, run
from homenode.snapshot.live import LiveSnapshot
from homenode.snapshot.protocol import Snapshot


class LocalMachine:
    """Programs start here; the snapshot is this machine's. See machine.protocol.Machine."""

    __slots__ = ()

    @property
    def name(self) -> str:
        return "this machine"

    def run(
        self,
        argv: Sequence[str],
        timeout_s: float,
        input: str | None = None,
        *,
        environment: Mapping[str, str] | None = None,
    ) -> Completed:
        return run(argv, timeout_s, input, environment=environment)

    def installed(self, names: Collection[str]) -> frozenset[str]:
        return frozenset(name for name in names if find_program(name) is not None)

    def snapshot(self) -> Snapshot:
        return LiveSnapshot()
