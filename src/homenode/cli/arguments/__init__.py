"""What is asked of each command: a record of its options, for help and completion as well [I/O]

Here are the options that several share.
"""

from pathlib import Path
from typing import Annotated

from homenode.opt import Arg, Flag, Opt

HostOption = Annotated[
    str | None,
    Opt(
        "--host",
        "SOURCE",
        "The host: a capture, or a name that homenode list hosts has. Default: this machine. Also "
        "taken: a folder or tar of /sys, an hwloc XML, a host.toml, lspci -vvv text.",
        complete="host_sources",
    ),
]

LspciOption = Annotated[
    Path | None,
    Opt("--lspci", "FILE", "Output of lspci -vvv that replaces the host's PCI tree.", rare=True),
]

DomainArgument = Annotated[
    str, Arg("NAME", "The domain: its name or UUID.", complete="domain_names")
]

DomainsArgument = Annotated[
    tuple[str, ...],
    Arg("NAME...", "The domains: names or UUIDs.", complete="domain_names"),
]

ConnectOption = Annotated[str, Opt("--connect -c", "URI", "The libvirt daemon.")]

OutputOption = Annotated[
    Path | None, Opt("--output -o", "FILE", "Write it here; - for standard output.")
]

ForceOption = Annotated[
    bool, Flag("--force -f", "Overwrite files that homenode did not write.", rare=True)
]

JsonOption = Annotated[bool, Flag("--json", "Print the documented JSON format.")]

DryRunOption = Annotated[bool, Flag("--dry-run -n", "Show what would change; change nothing.")]

SavePlanOption = Annotated[Path | None, Opt("--save-plan", "PLAN.json", "Write the plan here.")]

QuietOption = Annotated[bool, Flag("--quiet -q", "Do not print the explanation.", rare=True)]

PoolOption = Annotated[
    tuple[str, ...],
    Opt(
        "--pool",
        "POOL",
        "The hosts: a folder of captures or host.toml files, a list of hosts, a libvirt URI, or a "
        "shipped host times a number: 'hgx-h100*40'.",
    ),
]

KubeletOption = Annotated[
    Path | None,
    Opt(
        "--kubelet",
        "FILE",
        "kubectl get --raw /api/v1/nodes/NODE/proxy/configz, as a file; with --pool also a "
        "folder of NODE.json. Default: static CPU and memory managers, whole cores, "
        "single-numa-node, one core reserved.",
    ),
]

DeviceOption = Annotated[
    tuple[str, ...],
    Opt(
        "--device",
        "RESOURCE=BDF,...",
        "Devices of the host that a resource stands for, such as rdma/vf=3b:00.2,3b:00.3. "
        "nvidia.com/..., amd.com/... and gpu.intel.com/... stand for that vendor's GPUs.",
    ),
]

ResultsOption = Annotated[
    tuple[str, ...],
    Opt(
        "--results",
        "DIR",
        "Results to use besides the published figures. With --layout auto.",
    ),
]

AfterOption = Annotated[
    tuple[Path, ...],
    Opt(
        "--after",
        "PLAN.json",
        "The VM of this saved plan counts as running on the host.",
        panel="Placement",
        rare=True,
    ),
]
