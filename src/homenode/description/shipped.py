"""Hosts that come with homenode: the files of src/homenode/hosts, by name. [I/O]"""

from importlib.resources import files

from homenode.description.model import HostDescription
from homenode.description.parse import parse_description
from homenode.errors import UsageError
from homenode.wording import did_you_mean

_SUFFIX = ".toml"


def shipped_hosts() -> tuple[str, ...]:
    """Names of the hosts that come with homenode, sorted."""
    names = (entry.name for entry in (files("homenode") / "hosts").iterdir())
    return tuple(sorted(n.removesuffix(_SUFFIX) for n in names if n.endswith(_SUFFIX)))


def load_shipped(name: str) -> HostDescription:
    """A host that comes with homenode. Raises UsageError for a name that none has."""
    known = shipped_hosts()
    if name not in known:
        raise UsageError(
            f"host {name!r}: expected the name of a shipped host, found none such",
            hint=f"{did_you_mean(name, known)}homenode hosts lists them",
        )
    text = (files("homenode") / "hosts" / f"{name}{_SUFFIX}").read_text(encoding="utf-8")
    return parse_description(text, f"{name}{_SUFFIX}")
