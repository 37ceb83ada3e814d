"""Parser: what libvirt's own parser makes of a document, through its test driver. [I/O]

libvirt's schema is stricter than its parser, and the parser drops in silence what it does not know:
`virsh define` validates only when it is asked to. The test driver lives inside virsh: no daemon is
needed, and none has the domain afterwards. Seen with libvirt 9.0.
"""

from msgspec import Struct

from homenode.process import find_program, run
from homenode.vm.domain.copy import copy_domain
from homenode.vm.domain.document import Document, Element, parse_document

_URI = "test:///default"
_NAME = "homenode-check"
_TIMEOUT_S = 30.0
_NOT_KEPT_THERE = ("alias", "alias/@name", "address/@type")
"""What the test driver drops and QEMU's keeps, or what says nothing new. Elements of other
namespaces are the driver's own, too."""
_OF_VIRSH = ("Failed to define domain", "failed to get domain")


class Parsed(Struct, frozen=True):
    """What came of it. refusal: libvirt's message, None where it takes the document. dropped: the
    elements and attributes that it does not know there, as paths of two names."""

    refusal: str | None
    dropped: tuple[str, ...]


def parsed_by_libvirt(document: Document) -> Parsed | None:
    """None where no virsh is installed. Raises InputError for a document that names no domain."""
    if find_program("virsh") is None:
        return None
    copy = copy_domain(document.to_bytes(), _NAME)
    script = f"define --file /dev/stdin; dumpxml --inactive --security-info --domain {_NAME}"
    done = run(("virsh", "-q", "-c", _URI, script), _TIMEOUT_S, copy)
    if done.returncode:
        said = (line.removeprefix("error: ").strip() for line in done.stderr.splitlines())
        why = (line for line in said if line and not line.startswith(_OF_VIRSH))
        return Parsed(" ".join(why)[:400] or "no reason given", ())
    printed = parse_document(done.stdout.encode(), "libvirt's document")
    kept = set(_names(printed.root))
    lost = (name for name in _names(document.root) if name not in kept)
    return Parsed(None, tuple(dict.fromkeys(lost)))


def _names(element: Element) -> list[str]:
    """parent/child and element/@attribute of everything that libvirt itself reads."""
    found = []
    for one in element.walk():
        if one.name.startswith("{") or one.name == "metadata":
            continue
        found += [f"{one.name}/@{name}" for name, _ in one.attributes]
        found += [f"{one.name}/{child.name}" for child in one.children]
    return [
        name
        for name in found
        if name not in _NOT_KEPT_THERE
        and name.rpartition("/")[2] not in _NOT_KEPT_THERE
        and "{" not in name
        and ":" not in name
    ]
