"""Kept: whether libvirt holds what it was given, as far as a placement depends on it."""

from collections import Counter

from homenode.vm.domain.read import open_domain, vm_of
from homenode.vm.facts import diff


def not_kept(given: bytes, owned: bytes) -> tuple[str, ...]:
    """What of a document libvirt dropped or changed, by field; () where it holds all of it.

    libvirt writes addresses and defaults in, which is no change. Raises ParseError or InputError.
    """
    wanted = vm_of(open_domain(given, "the tuned document"))
    found = vm_of(open_domain(owned, "libvirt's document"))
    return tuple(
        f"{one.subject}: {one.expected} became {one.observed}" for one in diff(wanted, found)
    )


def is_printed(given: bytes, before: bytes, owned: bytes) -> bool:
    """Whether a definition is what libvirt printed of a given one, and it was not edited since.

    before: the definition that the given one was made from, as libvirt printed it. libvirt writes
    defaults and addresses into what is new in the given one; all else it prints as it did before.
    Raises ParseError or InputError.
    """
    return not is_edited(given, before, owned) and not not_kept(given, owned)


def is_edited(given: bytes, before: bytes, owned: bytes) -> bool:
    """Whether a definition differs from a given one in what neither libvirt nor the step from
    `before` changes. Raises ParseError or InputError."""
    old, new, found = _parts(before), _parts(given), _parts(owned)
    if (old & new) - found or _devices(new) != _devices(found):
        return True
    # Anything else that the given one does not have is libvirt's, in an element that changed, or
    # the address of a device that did: of a GPU that the VM did not have.
    changed = {path for path, _ in (new - old) + (old - new)}
    changed |= {f"{path}/address" for path in changed if path.startswith("/domain/devices/")}
    return any(path not in changed for path, _ in found - new)


def difference_count(one: bytes, other: bytes) -> int:
    """How many elements, each by itself, only one of two documents has."""
    first, second = _parts(one), _parts(other)
    return ((first - second) + (second - first)).total()


def _devices(parts: Counter[tuple[str, str]]) -> Counter[str]:
    """How many devices there are of each kind."""
    kinds: Counter[str] = Counter()
    for (path, _), count in parts.items():
        above, _, kind = path.rpartition("/")
        if above == "/domain/devices":
            kinds[kind] += count
    return kinds


def _parts(document: bytes) -> Counter[tuple[str, str]]:
    """(path of names, attributes and text) of each element by itself."""
    found: Counter[tuple[str, str]] = Counter()
    stack = [("", open_domain(document, "definition").root)]
    while stack:
        above, element = stack.pop()
        path = f"{above}/{element.name}"
        found[path, f"{sorted(element.attributes)} {element.text.strip()}"] += 1
        stack += [(path, child) for child in element.children]
    return found


def passwords_lost(original: bytes, tuned: bytes) -> tuple[str, ...]:
    """Displays that have a password in the original and none in the tuned document, by type.

    `virsh dumpxml` leaves passwords out unless --security-info asks for them.
    """
    before = _displays(original, "the definition")
    after = dict(_displays(tuned, "the tuned document"))
    return tuple(kind for kind, has in before if has and not after.get(kind, True))


def _displays(document: bytes, source: str) -> tuple[tuple[str, bool], ...]:
    devices = open_domain(document, source).root.child("devices")
    return tuple(
        (element.get("type") or "graphics", element.get("passwd") is not None)
        for element in (() if devices is None else devices.all("graphics"))
    )
