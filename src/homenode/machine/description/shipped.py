"""Hosts that come with homenode: the files of src/homenode/machine/hosts, by name. [I/O]"""

import re

from homenode.errors import UsageError
from homenode.machine.description.document import HostDescription
from homenode.machine.description.parse import parse_description
from homenode.package_data import package_names, package_text
from homenode.wording import did_you_mean

_FOLDER, _SUFFIX = ("machine", "hosts"), ".toml"
_SHAPE = re.compile(r"-(?:\d+p)?\d+n\d+c|-2p-cpus\Z", re.ASCII)


def shipped_hosts() -> tuple[str, ...]:
    """Names of the hosts that come with homenode, sorted."""
    names = package_names(*_FOLDER)
    return tuple(sorted(n.removesuffix(_SUFFIX) for n in names if n.endswith(_SUFFIX)))


def is_made_up(name: str) -> bool:
    """Whether a shipped host stands for no machine: it is named for its shape, such as 2 packages
    and 4 nodes."""
    return _SHAPE.search(name) is not None


def load_shipped(name: str) -> HostDescription:
    """A host that comes with homenode. Raises UsageError for a name that none has."""
    known = shipped_hosts()
    if name not in known:
        raise UsageError(
            f"host {name!r}: expected the name of a shipped host, found none such",
            hint=f"{did_you_mean(name, known)}homenode list hosts lists them",
        )
    return parse_description(package_text(*_FOLDER, f"{name}{_SUFFIX}"), f"{name}{_SUFFIX}")
