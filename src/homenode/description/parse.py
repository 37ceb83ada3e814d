"""From the text of a host.toml to a HostDescription. Pure; format: docs/formats/host-toml.md."""

import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import fields

from homenode.cpuset import CpuSet
from homenode.description.assembly import (
    cores_of,
    llcs_of,
    numa_nodes,
    online_pus,
    packages_of,
    pus_of,
    pus_of_node,
)
from homenode.description.buses import PciTree, address
from homenode.description.cpus import CPU_KEYS, parse_cores
from homenode.description.links import parse_links
from homenode.description.model import CacheSizes, Fact, HostDescription
from homenode.description.models import parse_models
from homenode.description.nodes import (
    NODE_KEYS,
    NodeSlot,
    parse_distances,
    parse_node_tables,
    parse_nodes,
)
from homenode.description.settings import parse_pu_settings, parse_settings
from homenode.description.table import Table
from homenode.description.tree import parse_roots
from homenode.description.vms import parse_housekeeping, parse_reserve, parse_vms
from homenode.errors import InputError
from homenode.topology import CpuModel, Host, HostSummary

VERSION = 1
"""Newest version of the format that this program reads."""
MAX_TEXT_CHARACTERS = 1 << 20

_OWN_KEYS = tuple(
    """
    format name about architecture cpu caches root model link iommu settings offline_pus
    disallowed_pus facts expect reserve vm
""".split()
)
_KEYS = (*_OWN_KEYS, *CPU_KEYS, *NODE_KEYS)
_CPU_KEYS = ("vendor", "name", "family", "model")
_CACHE_KEYS = ("l1_data", "l1_instruction", "l2")
_FACT_KEYS = ("published", "assumed")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}\Z")


def parse_description(text: str, source: str) -> HostDescription:
    """The machine that a host.toml describes. source: the file's name, for messages.

    Raises InputError, with the file, the key, what was expected and what was found.
    """
    if len(text) > MAX_TEXT_CHARACTERS:
        raise InputError(
            f"{source}: expected at most {MAX_TEXT_CHARACTERS} characters, found {len(text)}"
        )
    try:
        values = tomllib.loads(text)
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise InputError(f"{source}: expected TOML, found: {error}") from None
    file = Table.of(source, "", values, _KEYS)
    _check_format(file)
    name = file.text("name")
    if not _NAME.match(name):
        raise file.refusal("name", "a name of letters, digits, dots, dashes", name)
    cpu_table = file.table("cpu", _CPU_KEYS)
    cpu = CpuModel(
        cpu_table.optional_text("vendor"),
        cpu_table.optional_text("name"),
        cpu_table.optional_integer("family"),
        cpu_table.optional_integer("model"),
    )
    node_tables = parse_node_tables(file)
    slots = parse_cores(file, node_tables)
    nodes = parse_nodes(file, node_tables, slots)
    online = online_pus(file, slots)
    local = pus_of_node(slots, online)
    tree = _tree(file, cpu.vendor, nodes, local)
    cores = cores_of(slots, online)
    caches = file.table("caches", _CACHE_KEYS)
    level = file.integer("llc_level", 3, 1, 4)
    without = any(slot.llc is None for slot in slots)
    if (caches.values and without) or ("l2" in caches and level <= 2):
        # The largest of them would pass for the last level.
        found = "no last-level cache" if without else f"llc_level = {level}"
        raise file.refusal("caches", "a last-level cache above them", found)
    llcs = llcs_of(slots, online, level, file.size("llc_size"))
    host = Host(
        name=name,
        architecture=file.text("architecture", "x86_64"),
        cpu=cpu,
        packages=packages_of(slots, online),
        nodes=numa_nodes(source, nodes, local, tree.bdf_of_name),
        distances=parse_distances(file, nodes),
        llcs=llcs,
        cores=cores,
        pus=pus_of(slots, cores, llcs, online, parse_pu_settings(file, online)),
        root_complexes=tree.root_complexes,
        pci_devices=tree.devices,
        links=parse_links(file, tree),
        settings=parse_settings(file, online, smt=any(len(core.pus) > 1 for core in cores)),
        domains=parse_vms(file, nodes, online, local, tree),
        reserve=parse_reserve(file),
        housekeeping_pus=parse_housekeeping(file, online),
    )
    return HostDescription(
        source=source,
        about=file.text("about"),
        host=host,
        caches=CacheSizes(caches.size("l1_data"), caches.size("l1_instruction"), caches.size("l2")),
        facts=_facts(file),
        expect=_expect(file),
    )


def _check_format(file: Table) -> None:
    version = file.integer("format", VERSION, least=1)
    if version > VERSION:
        raise InputError(
            f"{file.source}: format: expected a host.toml up to version {VERSION}, found {version}",
            hint="it was written for a newer homenode: update this one",
        )


def _tree(
    file: Table,
    cpu_vendor: str | None,
    nodes: Sequence[NodeSlot],
    local: Mapping[int | None, CpuSet],
) -> PciTree:
    models = parse_models(file, cpu_vendor)
    indices = [node.index for node in nodes]
    roots = parse_roots(file, models, indices)
    # A node without cores has no local PUs, and says so.
    everywhere: dict[int | None, CpuSet] = {index: CpuSet() for index in indices}
    everywhere |= local
    return address(file.source, roots, models, everywhere, iommu=file.truth("iommu", True))


def _facts(file: Table) -> tuple[Fact, ...]:
    table = file.table("facts", _FACT_KEYS)
    published = table.values.get("published", {})
    if not isinstance(published, Mapping) or not all(
        isinstance(source, str) for source in published.values()
    ):
        raise table.refusal("published", 'lines such as "48 cores" = "source"', published)
    assumed = table.list("assumed")
    if not all(isinstance(each, str) for each in assumed):
        raise table.refusal("assumed", "a list of texts", list(assumed))
    return (
        *(Fact(str(statement), str(source)) for statement, source in published.items()),
        *(Fact(str(statement), None) for statement in assumed),
    )


def _expect(file: Table) -> tuple[tuple[str, int], ...]:
    known = tuple(field.name for field in fields(HostSummary))
    table = file.table("expect", known)
    found = []
    for key in known:
        if key in table:
            count = table.size(key) if key == "memory_bytes" else table.integer(key, 0)
            found.append((key, count or 0))
    return tuple(found)
