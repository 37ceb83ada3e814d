"""Export: what still fits, in the words of the schedulers that choose the host."""

import json
import re
from collections.abc import Callable

from homenode.pool.outlook import HostOutlook, PoolOutlook
from homenode.pool.scheduler import Scheduler

_DNS_NAME = re.compile(r"[a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?", re.ASCII)
_SLURM_NAME = re.compile(r"[A-Za-z0-9_.-]{1,63}", re.ASCII)


def unnamed(outlook: PoolOutlook, scheduler: Scheduler) -> tuple[str, ...]:
    """Hosts whose names the scheduler cannot have: they are left out."""
    pattern = _SLURM_NAME if scheduler is Scheduler.SLURM else _DNS_NAME
    if scheduler is Scheduler.NOVA:
        return ()
    return tuple(host.name for host in outlook.hosts if not pattern.fullmatch(host.name))


def export(outlook: PoolOutlook, scheduler: Scheduler) -> str:
    """The text for a scheduler; hosts that it cannot name are left out."""
    left_out = set(unnamed(outlook, scheduler))
    hosts = [host for host in outlook.hosts if host.name not in left_out]
    write: dict[Scheduler, Callable[[list[HostOutlook]], str]] = {
        Scheduler.KUBERNETES: _kubernetes,
        Scheduler.NOVA: _nova,
        Scheduler.SLURM: _slurm,
    }
    return write[scheduler](hosts)


def _word(name: str) -> str:
    """A flavour's name where only letters, digits and dashes may stand.

    >>> _word("GPU 8 (large)")
    'gpu-8-large'
    """
    return re.sub(r"[^a-z0-9]+", "-", name.casefold()).strip("-")[:40] or "flavour"


def _kubernetes(hosts: list[HostOutlook]) -> str:
    """Nodes with labels, and the same numbers as extended resources, for kubectl apply
    --server-side (and --subresource=status). Source: Kubernetes documentation, "Advertise Extended
    Resources for a Node"."""
    items = [
        {
            "apiVersion": "v1",
            "kind": "Node",
            "metadata": {
                "name": host.name,
                "labels": {
                    **{f"homenode.io/fits-{_word(f.flavour)}": str(f.local) for f in host.fits},
                    "homenode.io/stranded-gpus": str(host.stranded_gpus),
                },
            },
            "status": {
                "capacity": {f"homenode.io/{_word(f.flavour)}": str(f.local) for f in host.fits}
            },
        }
        for host in hosts
    ]
    return _json({"apiVersion": "v1", "kind": "List", "items": items})


def _nova(hosts: list[HostOutlook]) -> str:
    """Host aggregates by flavour, and traits by host. Source: Nova documentation, "Host
    aggregates"; os-traits: custom traits are CUSTOM_[A-Z0-9_]+."""
    names = {fit.flavour for host in hosts for fit in host.fits}
    aggregates = [
        {
            "name": f"homenode-fits-{_word(name)}",
            "metadata": {"homenode_fits": _word(name)},
            "hosts": [h.name for h in hosts for f in h.fits if f.flavour == name and f.local],
        }
        for name in sorted(names)
    ]
    traits = {
        host.name: [
            "CUSTOM_HOMENODE_FITS_" + _word(fit.flavour).replace("-", "_").upper()
            for fit in host.fits
            if fit.local
        ]
        for host in hosts
    }
    return _json({"aggregates": aggregates, "traits": traits})


def _slurm(hosts: list[HostOutlook]) -> str:
    """Arguments of scontrol: features for sizes that fit, and a weight that is larger the more of
    the largest size fits, so that broken-up hosts are filled first. Source: slurm.conf(5)."""
    lines = []
    for host in hosts:
        features = [f"homenode_{_word(f.flavour).replace('-', '_')}" for f in host.fits if f.local]
        weight = 1 + sum(fit.local * (2 << number) for number, fit in enumerate(host.fits))
        lines.append(
            f"update NodeName={host.name} AvailableFeatures={','.join(features) or 'homenode_full'}"
            f" Weight={weight}"
        )
    return "".join(f"{line}\n" for line in lines)


def _json(value: object) -> str:
    return json.dumps(value, indent=2, ensure_ascii=True) + "\n"
