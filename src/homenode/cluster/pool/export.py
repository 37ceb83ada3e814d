"""Export: which VMs still fit, in the formats of the schedulers that choose the host."""

import json
import re
from collections.abc import Callable

from homenode.cluster.pool.outlook import HostOutlook, PoolOutlook
from homenode.cluster.pool.rules import Scheduler

_DNS_LABEL = re.compile(r"[a-z0-9-]{1,63}", re.ASCII)
_SLURM_NAME = re.compile(
    r"(?!(?:all|default|localhost)\Z)[a-z0-9_][a-z0-9_.-]{0,62}", re.ASCII | re.IGNORECASE
)
"""Of a node. ALL is every node to scontrol, DEFAULT none, and localhost where scontrol runs."""
_MOST_LETTERS = 40


NEXT_STEP = {
    Scheduler.KUBERNETES: "kubectl apply --server-side --field-manager homenode -f FILE",
    Scheduler.DRA: "kubectl apply -f FILE",
    Scheduler.NOVA: "openstack aggregate create, set and add host for each aggregate; the traits "
    "go to nova-compute's provider.yaml",
    Scheduler.SLURM: "scontrol < FILE",
}
"""What takes the exported text, saved as FILE."""


def unnamed(outlook: PoolOutlook, scheduler: Scheduler) -> tuple[str, ...]:
    """Hosts whose names the scheduler does not accept: they are left out."""
    if scheduler is Scheduler.NOVA:
        return ()
    fits = _is_dns_name if scheduler is Scheduler.KUBERNETES else _SLURM_NAME.fullmatch
    return tuple(host.name for host in outlook.hosts if not fits(host.name))


def _is_dns_name(name: str) -> bool:
    """Whether a Kubernetes node can have the name: an RFC 1123 subdomain.

    >>> [_is_dns_name(name) for name in ("gpu-7.example.org", "a..b", "a.-b", "GPU-7")]
    [True, False, False, False]
    """
    parts = name.split(".")
    return len(name) <= 253 and all(
        _DNS_LABEL.fullmatch(part) and part.strip("-") == part for part in parts
    )


def export(outlook: PoolOutlook, scheduler: Scheduler) -> str:
    """The text for a scheduler, without hosts whose names it does not accept."""
    left_out = set(unnamed(outlook, scheduler))
    hosts = [host for host in outlook.hosts if host.name not in left_out]
    write: dict[Scheduler, Callable[[list[HostOutlook]], str]] = {
        Scheduler.KUBERNETES: _kubernetes,
        Scheduler.NOVA: _nova,
        Scheduler.SLURM: _slurm,
    }
    return write[scheduler](hosts)


def _words(hosts: list[HostOutlook]) -> tuple[str, ...]:
    """The names of the flavours with only letters, digits and dashes, each once; in the order of
    the hosts' fits."""
    found: list[str] = []
    for fit in hosts[0].fits if hosts else ():
        word, number = dns_word(fit.flavour), 1
        while (own := word if number == 1 else f"{word}-{number}") in found:
            number += 1
        found.append(own)
    return tuple(found)


def dns_word(name: str) -> str:
    """A flavour's name where only letters, digits and dashes may stand.

    >>> dns_word("GPU 8 (large)"), dns_word("a" * 39 + "-b"), dns_word("...")
    ('gpu-8-large', 'aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa', 'flavour')
    """
    plain = re.sub(r"[^a-z0-9]+", "-", name.casefold()).strip("-")
    return plain[:_MOST_LETTERS].strip("-") or "flavour"


def _kubernetes(hosts: list[HostOutlook]) -> str:
    """Nodes with labels, for kubectl apply --server-side. No extended resources: the flavours share
    GPUs, and whoever takes one of a flavour would leave the numbers of the others as they were."""
    words = _words(hosts)
    items = [
        {
            "apiVersion": "v1",
            "kind": "Node",
            "metadata": {
                "name": host.name,
                "labels": {
                    **{
                        f"homenode.io/fits-{word}": str(fit.local)
                        for word, fit in zip(words, host.fits, strict=True)
                    },
                    "homenode.io/stranded-gpus": str(host.stranded_gpus),
                },
            },
        }
        for host in hosts
    ]
    return _json({"apiVersion": "v1", "kind": "List", "items": items})


def _nova(hosts: list[HostOutlook]) -> str:
    """Host aggregates by flavour, and traits by host. Source: Nova documentation, "Host
    aggregates"; os-traits: custom traits are CUSTOM_[A-Z0-9_]+."""
    words = _words(hosts)
    aggregates = [
        {
            "name": f"homenode-fits-{word}",
            "metadata": {"homenode_fits": word},
            "hosts": [host.name for host in hosts if host.fits[number].local],
        }
        for number, word in enumerate(words)
    ]
    traits = {
        host.name: [
            "CUSTOM_HOMENODE_FITS_" + word.replace("-", "_").upper()
            for word, fit in zip(words, host.fits, strict=True)
            if fit.local
        ]
        for host in hosts
    }
    return _json({"aggregates": aggregates, "traits": traits})


def _slurm(hosts: list[HostOutlook]) -> str:
    """Arguments of scontrol: features for sizes that fit, and a weight that grows with the number
    of VMs of the scarcest size that fit, so that partly used hosts are filled first. Source:
    slurm.conf(5)."""
    words = _words(hosts)
    numbers = range(len(words))
    total = [sum(host.fits[i].local for host in hosts) for i in numbers]
    scarce = sorted(numbers, key=lambda i: (total[i], -i))
    left = {host.name: tuple(host.fits[i].local for i in scarce) for host in hosts}
    weight_of = {fits: weight for weight, fits in enumerate(sorted(set(left.values())), start=1)}
    lines = []
    for host in hosts:
        features = [
            f"homenode_{word.replace('-', '_')}"
            for word, fit in zip(words, host.fits, strict=True)
            if fit.local
        ]
        # Slurm takes no available features without those that are active.
        said = ",".join(features) or "homenode_full"
        lines.append(
            f"update NodeName={host.name} AvailableFeatures={said} ActiveFeatures={said} "
            f"Weight={weight_of[left[host.name]]}"
        )
    return "".join(f"{line}\n" for line in lines)


def _json(value: object) -> str:
    return json.dumps(value, indent=2, ensure_ascii=True) + "\n"
