# mypy: ignore-errors
"""Run by a Python that has OpenStack Nova: VMs of 1 to 8 GPUs that arrive and leave, placed by
Nova's host manager and filter scheduler in this process; stock weighers, or homenode's first.

Words: stock|homenode|filter REQUESTS HOSTS SEED. filter: stock weighers, and flavors that require
homenode's filter to keep VMs on one socket. Prints what came of it as JSON.

Nova's filters take some 15 ms for each host and request, hours for thousands of them. Hosts of so
much free on each cell are alike here, so that a filter is asked once for all of them.
"""

import json
import random
import sys
import time
import uuid
import warnings

warnings.filterwarnings("ignore")

import nova.conf  # noqa: E402
from nova import objects  # noqa: E402
from nova.pci import request as pci_request  # noqa: E402
from nova.pci import stats, whitelist  # noqa: E402
from nova.scheduler import host_manager, manager  # noqa: E402
from nova.scheduler.filters import numa_topology_filter, pci_passthrough_filter  # noqa: E402
from nova.virt import hardware  # noqa: E402

objects.register_all()
CONF = nova.conf.CONF
ALL = "nova.scheduler.{}s.all_{}s"
PLUGIN = "homenode.cluster.scheduler.nova."
CORES, MEMORY_MIB = 48, 1 << 20
"""Of each of two sockets, with two threads a core and 4 GPUs."""


def configure(weigher):
    CONF([], project="nova", default_config_files=[])
    filters, weighers = (
        ["nova.scheduler.filters.all_filters"],
        ["nova.scheduler.weights.all_weighers"],
    )
    enabled = ["NUMATopologyFilter", "PciPassthroughFilter"]
    if weigher != "stock":
        filters.append(PLUGIN + "HomenodeFilter")
        enabled.append("HomenodeFilter")
    if weigher == "homenode":
        weighers.append(PLUGIN + "HomenodeWeigher")
    group = "filter_scheduler"
    CONF.set_override("available_filters", filters, group=group)
    CONF.set_override("enabled_filters", enabled, group=group)
    CONF.set_override("weight_classes", weighers, group=group)
    CONF.set_override("track_instance_changes", False, group=group)
    alias = {"name": "gpu", "vendor_id": "10de", "product_id": "2330", "device_type": "type-PCI"}
    alias["numa_policy"] = "preferred"
    CONF.set_override("alias", [json.dumps(alias)], group="pci")


def host_state(name):
    topology = objects.NUMATopology(
        cells=[
            objects.NUMACell(
                id=node,
                cpuset=set(),
                pcpuset={pu for core in cores for pu in core},
                memory=MEMORY_MIB,
                cpu_usage=0,
                memory_usage=0,
                pinned_cpus=set(),
                siblings=cores,
                mempages=[
                    objects.NUMAPagesTopology(size_kb=4, total=MEMORY_MIB * 256, used=0, reserved=0)
                ],
                socket=node,
                network_metadata=objects.NetworkMetadata(physnets=set(), tunneled=False),
            )
            for node in (0, 1)
            for cores in [
                [{2 * core, 2 * core + 1} for core in range(CORES * node, CORES * (node + 1))]
            ]
        ]
    )
    found = host_manager.HostState(name, name, str(uuid.uuid4()))
    found.uuid = str(uuid.uuid4())
    found.numa_topology = topology
    found.total_usable_ram_mb = found.free_ram_mb = 2 * MEMORY_MIB
    found.total_usable_disk_gb, found.free_disk_mb = 10_000, 10_000 * 1024
    found.vcpus_total = 4 * CORES
    found.ram_allocation_ratio = found.cpu_allocation_ratio = found.disk_allocation_ratio = 1.0
    found.pci_stats = stats.PciDeviceStats(topology, dev_filter=whitelist.Whitelist([]))
    found.pci_stats.pools = [
        {
            "vendor_id": "10de",
            "product_id": "2330",
            "numa_node": node,
            "dev_type": "type-PCI",
            "count": 4,
        }
        for node in (0, 1)
    ]
    return found


def request(gpus, extra):
    cells = 2 if gpus > 4 else 1
    flavor = objects.Flavor(
        id=gpus,
        name=f"gpu{gpus}",
        flavorid=f"gpu{gpus}",
        vcpus=12 * gpus,
        memory_mb=100 * 1024 * gpus,
        root_gb=10,
        ephemeral_gb=0,
        swap=0,
        rxtx_factor=1.0,
        vcpu_weight=0,
        extra_specs={
            "hw:cpu_policy": "dedicated",
            "hw:numa_nodes": str(cells),
            "pci_passthrough:alias": f"gpu:{gpus}",
            **extra,
        },
    )
    image = objects.ImageMeta(properties=objects.ImageMetaProps())
    return objects.RequestSpec(
        context=None,
        flavor=flavor,
        image=image,
        num_instances=1,
        instance_uuid=str(uuid.uuid4()),
        numa_topology=hardware.numa_get_constraints(flavor, image),
        pci_requests=pci_request.get_pci_requests_from_flavor(flavor),
        requested_resources=[],
        ignore_hosts=None,
        force_hosts=None,
        force_nodes=None,
        instance_group=None,
        retry=None,
        limits=objects.SchedulerLimits(),
        scheduler_hints={},
        availability_zone=None,
        requested_destination=None,
        request_level_params=objects.RequestLevelParams(),
    )


def free(host):
    count = {0: 0, 1: 0}
    for pool in host.pci_stats.pools:
        count[pool["numa_node"]] += pool["count"]
    return count


def remember(kind):
    """Hosts alike share the filter's answer."""
    known, asked = {}, kind.host_passes

    def host_passes(self, host, spec):
        cells = [(len(cell.free_pcpus), cell.memory_usage) for cell in host.numa_topology.cells]
        key = (spec.flavor.name, *cells, *sorted(free(host).items()))
        if key not in known:
            known[key] = asked(self, host, spec), host.limits.get("numa_topology")
        passes, limits = known[key]
        if limits is not None:
            host.limits["numa_topology"] = limits
        return passes

    kind.host_passes = host_passes


def release(host, spec, gpus_of_node):
    """What a VM had is free again, as the resource tracker frees it."""
    host.numa_topology = hardware.numa_usage_from_instance_numa(
        host.numa_topology, spec.numa_topology, free=True
    )
    for node, number in gpus_of_node.items():
        pool = next((one for one in host.pci_stats.pools if one["numa_node"] == node), None)
        if pool is None:
            pool = {"vendor_id": "10de", "product_id": "2330", "numa_node": node}
            pool |= {"dev_type": "type-PCI", "count": 0}
            host.pci_stats.pools.append(pool)
        pool["count"] += number
    host.free_ram_mb += spec.memory_mb
    host.free_disk_mb += spec.root_gb * 1024
    host.vcpus_used -= spec.vcpus
    host.num_instances -= 1
    host.num_io_ops -= 1


def main(weigher, requests, count, seed):
    extra = {"homenode:locality": "require"} if weigher == "filter" else {}
    configure(weigher)
    remember(numa_topology_filter.NUMATopologyFilter)
    remember(pci_passthrough_filter.PciPassthroughFilter)
    scheduler = manager.SchedulerManager.__new__(manager.SchedulerManager)
    host_manager.HostManager._init_aggregates = lambda self: None
    host_manager.HostManager.refresh_cells_caches = lambda self: None
    scheduler.host_manager = host_manager.HostManager()
    hosts = [host_state(f"host-{number}") for number in range(count)]
    draw = random.Random(seed)
    random.seed(seed)
    refused, crossed, stranded, spent, asked = 0, 0, 0, 0.0, 0
    refused_by = {1: 0, 2: 0, 4: 0, 8: 0}
    order = []  # of arrivals, placed or not: departures do not depend on the scheduler
    for _ in range(requests):
        gpus = draw.choices((1, 2, 4, 8), (4, 3, 2, 1))[0]
        while order and asked + gpus > 0.92 * 8 * count:
            gone = order.pop(draw.randrange(len(order)))
            asked -= gone[0]
            if gone[1] is not None:
                release(*gone[1])
        spec = request(gpus, extra)
        for host in hosts:  # as Placement answers where it does not count PCI devices
            host.allocation_candidates = [{"allocations": {}, "mappings": {}}]
        start = time.process_time()
        chosen = scheduler._get_sorted_hosts(spec, hosts, 0)
        spent += time.process_time() - start
        placed = None
        if not chosen:
            refused += 1
            refused_by[gpus] += 1
        else:
            host = chosen[0]
            before = free(host)
            scheduler._consume_selected_host(host, spec)
            after = free(host)
            had = {
                node: before[node] - after[node] for node in before if before[node] > after[node]
            }
            cells = {cell.id for cell in spec.numa_topology.cells}
            crossed += gpus <= 4 and (len(had) > 1 or not {*had} <= cells)
            placed = (host, spec, had)
        order.append((gpus, placed))
        asked += gpus
        stranded += sum(n for one in hosts for n in free(one).values() if n < 4)
    print(
        json.dumps(
            {
                "requests": requests,
                "refused": refused,
                "refused_by": refused_by,
                "crossed": crossed,
                "stranded": stranded / requests,
                "ms": 1e3 * spent / requests,
                "filters": [type(one).__name__ for one in scheduler.host_manager.enabled_filters],
                "weighers": [type(one).__name__ for one in scheduler.host_manager.weighers],
            }
        )
    )


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:5]))
