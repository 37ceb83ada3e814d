# mypy: ignore-errors
"""Run by a Python that has OpenStack Nova: its validators, and its fit of flavors to a host.

Reads a JSON list of flavors, each with the "host" cells that it is for, from standard input; with
the host's "devices" and the [pci] options "alias" and "device_spec" where it has PCI aliases.
Prints for each {"errors": [...], "cells": [{"node", "pins", "memory"}...] or null}, as a list.
"""

import json
import sys
import warnings

warnings.filterwarnings("ignore")

import nova.conf  # noqa: E402
from nova import exception, objects  # noqa: E402
from nova.api.validation.extra_specs import validators  # noqa: E402
from nova.pci import request, stats, whitelist  # noqa: E402
from nova.virt import hardware  # noqa: E402

objects.register_all()


def host_topology(cells):
    return objects.NUMATopology(
        cells=[
            objects.NUMACell(
                id=cell["node"],
                cpuset=set(),
                pcpuset=set(cell["pus"]),
                memory=cell["memory_mib"],
                cpu_usage=0,
                memory_usage=0,
                pinned_cpus=set(),
                siblings=[set(core) for core in cell["cores"]],
                mempages=[
                    objects.NUMAPagesTopology(size_kb=size, total=total, used=0, reserved=0)
                    for size, total in cell["pages"]
                ],
                socket=cell["package"],
                network_metadata=objects.NetworkMetadata(physnets=set(), tunneled=False),
            )
            for cell in cells
        ]
    )


def pci_stats(topology, one):
    found = stats.PciDeviceStats(topology, dev_filter=whitelist.Whitelist(one["device_spec"]))
    for device in one["devices"]:
        facts = {"compute_node_id": 1, "status": "available", "dev_id": "", "extra_info": {}}
        facts |= {"label": "", "dev_id": f"pci_{device['address']}", **device}
        found.add_device(objects.PciDevice.create(None, facts))
    return found


def pci_requests(one, flavor, image):
    nova.conf.CONF.set_override("alias", one["alias"], group="pci")
    request.get_alias_from_config.cache_clear()
    policy = hardware.get_pci_numa_policy_constraint(flavor, image)
    return request.get_pci_requests_from_flavor(flavor, policy).requests


def answer(host, one):
    errors = []
    for name, value in one["extra_specs"].items():
        try:
            validators.validate(name, value)
        except exception.ValidationError as error:
            errors.append(str(error))
    flavor = objects.Flavor(
        name="f",
        vcpus=one["vcpus"],
        memory_mb=one["ram"],
        root_gb=0,
        ephemeral_gb=0,
        swap=0,
        extra_specs=one["extra_specs"],
        rxtx_factor=1.0,
        vcpu_weight=0,
        is_public=True,
        disabled=False,
        flavorid="f",
    )
    image = objects.ImageMeta.from_dict({"properties": one["properties"]})
    wanted = hardware.numa_get_constraints(flavor, image)
    topology = host_topology(host)
    devices, requests = None, []
    if "alias" in one:
        devices, requests = pci_stats(topology, one), pci_requests(one, flavor, image)
    supported = not requests or devices.support_requests(requests, {})
    if wanted is None:
        return {"errors": errors, "cells": None, "topology": None, "devices": supported}
    placed = hardware.numa_fit_instance_to_host(
        topology, wanted, provider_mapping={}, pci_requests=requests, pci_stats=devices
    )
    best = hardware.get_best_cpu_topology(flavor, image)
    return {
        "errors": errors,
        "devices": supported,
        "topology": [best.sockets, best.cores, best.threads],
        "cells": None
        if placed is None
        else [
            {
                "node": cell.id,
                "memory": cell.memory,
                "vcpus": sorted(cell.pcpuset | cell.cpuset),
                "pins": {str(v): p for v, p in (cell.cpu_pinning or {}).items()},
            }
            for cell in placed.cells
        ],
    }


for line in sys.stdin:
    found = [answer(flavor["host"], flavor) for flavor in json.loads(line)]
    print(f"@@{json.dumps(found)}", flush=True)
