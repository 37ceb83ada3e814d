"""Published evidence: which layout the literature supports for an objective, and how far.

Until there are measurements of one's own, `--layout auto` follows these figures and says so. Every
sentence names its source; a combination that nobody has measured is called unmeasured.

Sources: [study] "GPU VM Performance: Do vCPU Pinning and NUMA Topology Really Matter?",
cloudrift.ai, 2026-04-22. [ibm] "Optimizing GPU accelerated VMs with KubeVirt", IBM Developer,
2026-01. [xapi] xapi-project/xen-api pull request 6763, 2025-11.
"""

from dataclasses import dataclass

from homenode.objective import Objective
from homenode.plan.layout import PRESETS, Layout


@dataclass(frozen=True, slots=True)
class Choice:
    """A layout for an objective, the published figures that speak for it, and what they leave open.

    keep_vcpus: siblings take half the cores rather than double the vCPUs.
    """

    layout: Layout
    keep_vcpus: bool
    evidence: tuple[str, ...]
    doubts: tuple[str, ...]


_UNMEASURED_PCI = (
    "no published run gave the guest both cells and expander buses: the collective figures of "
    "pin-numa come from guests whose GPUs had no NUMA node. Measure pin-numa-pci before you "
    "decide against cells."
)


def choose(objective: Objective, *, has_gpus: bool, mirrors_pcie: bool) -> Choice:
    """The layout that published figures support.

    has_gpus: the VM has passed-through GPUs. mirrors_pcie: its machine type takes expander buses.
    """
    match objective:
        case Objective.COLLECTIVE:
            return Choice(
                PRESETS["pin"],
                False,
                (
                    "[study] NCCL peak busbw, RTX PRO 6000: pin 20.5, default 8.4, pin-numa 7.6 "
                    "GB/s; H200: default 20.2, pin 18.4, pin-numa 8.6 GB/s; MI350X: no difference "
                    "that matters (11.3 to 11.8)",
                ),
                (
                    "on the H200 host pin over default rests on memory latency (112 against 140 "
                    "ns), not on NCCL",
                    _UNMEASURED_PCI,
                ),
            )
        case Objective.HOST_BANDWIDTH if has_gpus and mirrors_pcie:
            return Choice(
                PRESETS["pin-numa-pci"],
                False,
                (
                    "[study] STREAM, pin-numa over default: H200 561 against 77 GB/s, MI350X 813 "
                    "against 241, RTX PRO 6000 261 against 83, RTX 4090 74 against 39",
                    "[ibm] H2D per A100 with expander buses 15.6, without 12.6 GB/s on the GPUs "
                    "that the guest took for the wrong node's",
                ),
                (_UNMEASURED_PCI,),
            )
        case Objective.HOST_BANDWIDTH:
            return Choice(
                PRESETS["pin-numa"],
                False,
                (
                    "[study] STREAM, pin-numa over default: H200 561 against 77 GB/s, MI350X 813 "
                    "against 241, RTX PRO 6000 261 against 83, RTX 4090 74 against 39",
                ),
                (_UNMEASURED_PCI,) if has_gpus else (),
            )
        case Objective.LATENCY:
            return Choice(
                PRESETS["pin-numa"],
                False,
                (
                    "[study] DRAM latency, H200: default 140, pin 112, pin-numa 101, with SMT 100 "
                    "ns; MI350X: 144, 145, 135, 137 ns",
                ),
                ("one run per layout: 101 against 100 ns is noise",),
            )
        case Objective.DEVICE_TRANSFER:
            return Choice(
                PRESETS["pin-numa-pci" if mirrors_pcie else "pin"],
                False,
                (
                    "[ibm] H2D per A100 with expander buses 15.6, without 12.6 GB/s on the GPUs "
                    "that the guest took for the wrong node's",
                ),
                ("one system; the study saw no difference without expander buses",),
            )
        case Objective.THROUGHPUT:
            return Choice(
                PRESETS["pin"],
                False,
                (
                    "[study] sysbench events/s, siblings exposed over hidden: MI350X 740,449 "
                    "against 721,474 (+2.6 %), H200 237,801 against 232,536 (+2.3 %)",
                ),
                (
                    "pin-numa-smt may give 2 to 3 % more for twice the vCPUs: one run each, and "
                    "less than what matters",
                ),
            )
        case Objective.DENSITY:
            return Choice(
                PRESETS["pin-numa-smt"],
                True,
                (
                    "[study] siblings help to pack many small GPU guests onto a host",
                    "[xapi] the price: a VM packed by threads rather than cores loses 40 to 75 % "
                    "of CPU throughput (OpenSSL, POV-Ray, OpenVINO)",
                ),
                (),
            )
