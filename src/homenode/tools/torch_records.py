"""Torch records: the fields of homenode.torch/1, as our PyTorch programs print them."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TorchDevice:
    """index: PyTorch's. address: None where it does not say; node: None for -1."""

    index: int
    address: str | None
    name: str
    node: int | None


@dataclass(frozen=True, slots=True)
class TorchThread:
    """Where the thread that started the copies ran at the end of them."""

    cpu: int | None
    node: int | None


@dataclass(frozen=True, slots=True)
class TorchFigure:
    """One series. device, peer: indices. memory_node: of the host buffer, where it can be seen.

    steady: whether it had become so before the first sample. warmups: repeats before it.
    """

    metric: str
    unit: str
    device: int
    samples: tuple[float, ...]
    steady: bool
    warmups: int
    thread: TorchThread
    variant: str | None = None
    peer: int | None = None
    size_bytes: int | None = None
    memory_node: int | None = None


@dataclass(frozen=True, slots=True)
class TorchGap:
    """What could not be measured, in PyTorch's words."""

    subject: str
    reason: str


@dataclass(frozen=True, slots=True)
class TorchRow:
    """One message size of an all-reduce in place. time_ns: of one, of the slowest rank."""

    size_bytes: int
    time_ns: float
    iterations: int
    wrong_ranks: int


@dataclass(frozen=True, slots=True)
class TorchRank:
    """Where a rank was bound, and where its thread was at the end."""

    rank: int
    device: int
    bound_node: int | None
    cpu: int | None
    node: int | None


@dataclass(frozen=True, slots=True)
class TorchChoice:
    """What the library chose for a message size, in its own words or numbers."""

    size_bytes: int
    algorithm: str
    protocol: str


@dataclass(frozen=True, slots=True)
class TorchRun:
    """One document. failed: why this node's process measured nothing.

    stalled: the figure that did not come, whereupon the program ended itself.
    """

    command: str = ""
    torch: str = ""
    runtime: str = ""
    devices: tuple[TorchDevice, ...] = ()
    bound_node: int | None = None
    copy_bytes: int | None = None
    figures: tuple[TorchFigure, ...] = ()
    gaps: tuple[TorchGap, ...] = ()
    stalled: str | None = None
    failed: str | None = None
    gpus: int = 0
    bind: str = "none"
    peers: bool = True
    warmups: int = 0
    rows: tuple[TorchRow, ...] = ()
    ranks: tuple[TorchRank, ...] = ()
    choices: tuple[TorchChoice, ...] = ()
