"""Library: what versions of NCCL, and RCCL, do differently with one and the same topology.

Values were read in NVIDIA/nccl at 2.20.5 (ab2b89c), 2.22.3 (178b6b7), 2.26.2 (f44ac75) and 2.30.7,
and in ROCm/rccl. A version between two of these counts as the older one.
"""

import re
from enum import StrEnum

from msgspec import Struct

from homenode.nccl.topology import NcclVariant


class LinkSource(StrEnum):
    """Where the library reads the speed of a GPU's link that no file gives."""

    SYSFS = "the lesser of port and device in sysfs"
    DRIVER = "the driver (NVML)"


class BufferSource(StrEnum):
    """Where host buffers between processes come from."""

    SHARED_FILE = "a file in /dev/shm, on the node of the thread that allocates it"
    HOST_NUMA_ID = "cuMem at the GPU's HOST_NUMA_ID; a negative one becomes node 0"


class Library(Struct, frozen=True, kw_only=True):
    """A version. version: (major, minor), None for RCCL. knows_newer_intel: it has rates for
    Sapphire and Emerald Rapids. knows_c2c: NVLink-C2C is a kind of its own; it was NVLink."""

    name: str
    flavour: NcclVariant
    version: tuple[int, int] | None
    link_source: LinkSource
    buffers: BufferSource
    knows_newer_intel: bool
    cpu_link_source: str
    p2p_through_cpus: bool = False
    knows_c2c: bool = False

    def gb_per_s_between_cpus(
        self, architecture: str | None, vendor: str | None, family: int | None, model: int | None
    ) -> float:
        """What the library takes the link between two nodes' CPUs for."""
        if architecture == "ppc64":
            return 32.0
        if architecture == "arm64":
            return 6.0
        if architecture != "x86_64":
            return _LOCAL
        if vendor == "AuthenticAMD":
            return 16.0
        if vendor == "CentaurHauls" or vendor == "  Shanghai  ":
            return 9.0 if (family, model) == (7, 0x5B) else 6.0
        if vendor != "GenuineIntel":
            return _LOCAL
        steps = _INTEL if self.knows_newer_intel else _OLDER_INTEL
        return next((gb for least, gb in steps if family == 6 and (model or 0) >= least), 6.0)


_LOCAL = 5000.0
_OLDER_INTEL = ((0x55, 10.0),)
_INTEL = ((0xCF, 40.0), (0x8F, 22.0), *_OLDER_INTEL)
"""Least model number of family 6 -> GB/s: Emerald Rapids, Sapphire Rapids, Skylake on."""

NCCL_2_20 = Library(
    name="2.20",
    flavour=NcclVariant.NCCL,
    version=(2, 20),
    link_source=LinkSource.SYSFS,
    buffers=BufferSource.SHARED_FILE,
    knows_newer_intel=False,
    cpu_link_source="src/graph/topo.cc (ncclTopoAddCpu), 2.20.5",
)
NCCL_2_21 = Library(
    name="2.21",
    flavour=NcclVariant.NCCL,
    version=(2, 21),
    link_source=LinkSource.SYSFS,
    buffers=BufferSource.SHARED_FILE,
    knows_newer_intel=False,
    cpu_link_source="src/graph/topo.h:20-22, 2.22.3",
)
NCCL_2_26 = Library(
    name="2.26",
    flavour=NcclVariant.NCCL,
    version=(2, 26),
    link_source=LinkSource.SYSFS,
    buffers=BufferSource.HOST_NUMA_ID,
    knows_newer_intel=True,
    cpu_link_source="src/graph/topo.h:21-25, 2.26.2",
)
NCCL_2_30 = Library(
    name="2.30",
    flavour=NcclVariant.NCCL,
    version=(2, 30),
    link_source=LinkSource.DRIVER,
    buffers=BufferSource.HOST_NUMA_ID,
    knows_newer_intel=True,
    cpu_link_source="src/graph/topo.h (ERP_QPI_BW), 2.30.7",
    knows_c2c=True,
)
RCCL = Library(
    name="RCCL",
    flavour=NcclVariant.RCCL,
    version=None,
    link_source=LinkSource.SYSFS,
    buffers=BufferSource.SHARED_FILE,
    knows_newer_intel=True,
    cpu_link_source="src/graph/topo.h of ROCm/rccl",
    p2p_through_cpus=True,
)

NCCL_LIBRARIES = (NCCL_2_20, NCCL_2_21, NCCL_2_26, NCCL_2_30)

_VERSION = re.compile(r"(\d{1,3})\.(\d{1,3})", re.ASCII)


def library_of(version: str) -> Library | None:
    """The library that behaves as this version: the newest known one that is not newer.

    >>> library_of("2.28.9+cuda13.0").name, library_of("2.18.3").name, library_of("new")
    ('2.26', '2.20', None)
    """
    found = _VERSION.match(version)
    if found is None:
        return None
    number = int(found[1]), int(found[2])
    older = [one for one in NCCL_LIBRARIES if one.version is not None and one.version <= number]
    return older[-1] if older else NCCL_LIBRARIES[0]
