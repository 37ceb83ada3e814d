"""Schema: check a document with the installed libvirt's domain.rng and its parser. [I/O]

libvirt's schema is stricter than its parser, which silently drops unknown elements: `virsh define`
validates only with --validate. The test driver runs inside virsh: no daemon is needed or changed.
Seen with libvirt 9.0."""

from contextlib import suppress
from functools import lru_cache
from pathlib import Path

from lxml import etree
from msgspec import Struct

from homenode.errors import HomenodeError, InputError, ToolError
from homenode.findings import Gap
from homenode.machine.tools.versions import Version
from homenode.process import find_program, run
from homenode.units import parse_whole
from homenode.vm.domain.cells import cells_bytes
from homenode.vm.domain.copy import copy_domain
from homenode.vm.domain.document import Document, Element, parse_document
from homenode.vm.domain.edits import NewElement, append, apply, set_text

SCHEMA_PATH = "/usr/share/libvirt/schemas/domain.rng"
"""Path in the package libvirt-common of every distribution."""


class SchemaError(Struct, frozen=True):
    line: int  # line of the document
    message: str


def validate(
    xml: bytes, schema_path: str = SCHEMA_PATH
) -> tuple[tuple[SchemaError, ...], Gap | None]:
    """Return (errors, gap); the gap is the reason why nothing was checked: no libvirt.

    crosscheck covers references, which the schema does not. Raises InputError for an unreadable
    schema or malformed XML.
    """
    if not Path(schema_path).is_file():
        return (), Gap(
            "domain.rng", f"{schema_path} is not there; install libvirt's common files to check"
        )
    try:
        # lxml's own guards: no entities, no network. The document's DTD, if any, is not loaded.
        parser = etree.XMLParser(resolve_entities=False, no_network=True, load_dtd=False)
        tree = etree.fromstring(xml, parser)
    except etree.XMLSyntaxError as error:
        raise InputError(f"domain: expected well-formed XML, found: {error.msg}") from None
    schema = _load(schema_path)
    if schema.validate(tree):
        return (), None
    return tuple(SchemaError(entry.line, entry.message) for entry in schema.error_log), None


def reject_new_errors(before: bytes, after: bytes, libvirt: Version | None = None) -> Gap | None:
    """Raise HomenodeError if an edit broke a document; the gap is the reason for no check. A
    document that was invalid before, or needs a newer libvirt than installed, is not checked."""
    errors, gap = validate(after)
    if gap is not None or not errors:
        return gap
    errors_before, _ = validate(before)
    if errors_before:
        first = errors_before[0]
        return Gap(
            "domain.rng", f"the original is not valid either, line {first.line}: {first.message}"
        )
    installed_version = _read_version()
    if libvirt is not None and installed_version is not None and libvirt > installed_version:
        return Gap(
            "domain.rng",
            f"the definition is for libvirt {_format_version(libvirt)}; the installed schema of "
            f"{_format_version(installed_version)} reports {errors[0].message}",
        )
    raise HomenodeError(
        f"the tuned definition, line {errors[0].line}: libvirt's schema reports "
        f"{errors[0].message}",
        hint="update libvirt, or choose another --layout; nothing was written",
    )


def _read_version() -> Version | None:
    """Return the version of the installed libvirt's schema; None without virsh."""
    try:
        output = run(("virsh", "--version"), 10)
    except ToolError:
        return None
    match [parse_whole(word) for word in output.stdout.strip().split(".")]:
        case [int(major), int(minor), int(release)]:
            return major, minor, release
    return None


def _format_version(version: Version) -> str:
    return ".".join(map(str, version))


@lru_cache(maxsize=4)
def _load(schema_path: str) -> etree.RelaxNG:
    try:
        return etree.RelaxNG(etree.parse(schema_path))
    except (etree.XMLSyntaxError, etree.RelaxNGParseError, OSError) as error:
        raise InputError(f"{schema_path}: expected libvirt's domain.rng, found: {error}") from None


_URI = "test:///default"
_NAME = "homenode-check"
_TIMEOUT_S = 30.0
_NOT_KEPT_THERE = ("alias", "alias/@name", "address/@type")
"""Elements that the test driver drops and QEMU's driver keeps, or that have no information.
Elements of other namespaces are the driver's own, too."""
_OF_VIRSH = ("Failed to define domain", "failed to get domain")


class ParseResult(Struct, frozen=True):
    """The answer of libvirt's parser."""

    refusal: str | None  # libvirt's message, None if it accepts the document
    # unknown elements and attributes, as paths of two names
    dropped: tuple[str, ...]


def parse_with_libvirt(document: Document) -> ParseResult | None:
    """Parse a copy with libvirt's test driver; None without virsh, or if no copy can be made."""
    if find_program("virsh") is None:
        return None
    memory = document.root.child("memory")
    with suppress(InputError):  # of a size that libvirt rejects itself
        if memory is not None and cells_bytes(document):
            # Only for 0 the test driver uses the cells' sum, as QEMU's driver always does. Source:
            # virDomainDefPostParseMemory, with and without VIR_DOMAIN_DEF_PARSE_ABI_UPDATE.
            document = apply(document, set_text(document, memory, "0"))
    devices = document.root.child("devices")
    if devices is not None and all(
        controller.get("type") != "usb" for controller in document.root.all("devices/controller")
    ):
        # QEMU's driver adds one, of which redirected devices are.
        document = apply(
            document, append(document, devices, [NewElement("controller", {"type": "usb"})])
        )
    dump = f"; dumpxml --inactive --security-info --domain {_NAME}"
    try:
        copy = copy_domain(document.to_bytes(), _NAME)
    except InputError:
        copy, dump = document.to_bytes(), ""
    script = f"define --file /dev/stdin{dump}"
    result = run(("virsh", "-q", "-c", _URI, script), _TIMEOUT_S, copy)
    if result.returncode:
        complaints = (line for line in result.list_messages() if not line.startswith(_OF_VIRSH))
        return ParseResult(" ".join(complaints)[:400] or "no reason given", ())
    if not dump:
        return None
    printed_document = parse_document(result.stdout.encode(), "libvirt's definition")
    printed_names = set(_list_names(printed_document.root))
    lost_names = (name for name in _list_names(document.root) if name not in printed_names)
    return ParseResult(None, tuple(dict.fromkeys(lost_names)))


def _list_names(element: Element) -> list[str]:
    """Return parent/child and element/@attribute of everything that libvirt reads."""
    names = []
    for descendant in element.walk():
        if descendant.name.startswith("{") or descendant.name == "metadata":
            continue
        names += [f"{descendant.name}/@{name}" for name, _ in descendant.attributes]
        names += [f"{descendant.name}/{child.name}" for child in descendant.children]
    return [
        name
        for name in names
        if name not in _NOT_KEPT_THERE
        and name.rpartition("/")[2] not in _NOT_KEPT_THERE
        and "{" not in name
        and ":" not in name
    ]
