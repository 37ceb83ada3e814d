"""Redaction of libvirt domains: no text of anyone's survives, and what planning reads does."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from lxml import etree
from msgspec.structs import replace

from homenode.errors import HomenodeError
from homenode.machine.snapshot.protocol import MemorySnapshot
from homenode.machine.snapshot.redact import Identities, redact
from homenode.vm.domain.read import read_running_domain
from tests.seeds import THOROUGH

DOCUMENTS = sorted((Path(__file__).parents[1] / "domains").glob("*.xml"))
SCHEMAS = Path("/usr/share/libvirt/schemas")
RNG = "{http://relaxng.org/ns/structure/1.0}"
PARTS_OF_SCHEMA = """
    domaincommon basictypes cputypes networkcommon nwfilter_params privatedata storagecommon
""".split()
MARKER = "acmecorp"


def _redacted(domain: etree._Element) -> etree._Element:
    text = "<domains>" + etree.tostring(domain, encoding="unicode", with_tail=False) + "</domains>"
    snapshot = MemorySnapshot("host", {}, {}, {"virsh-domains": text})
    kept = redact(snapshot, Identities()).snapshot.commands["virsh-domains"]
    return etree.fromstring(kept)


def _domain(path: Path) -> etree._Element:
    return etree.fromstring(path.read_bytes())


def _planted(domain: etree._Element) -> Iterator[str]:
    """Plants the marker in one place after the other and names it: values, texts, tails, comments,
    elements and attributes that no schema has."""
    for element in list(domain.iter(etree.Element)):
        for name in ("text", "tail") if element is not domain else ("text",):
            before = getattr(element, name)
            for planted in (MARKER, f"{before} ua-{MARKER}-1"):
                setattr(element, name, planted)
                yield f"{element.tag!s} {name}"
            setattr(element, name, before)
        for attribute, value in [(str(a), str(v)) for a, v in element.attrib.items()]:
            for planted in (MARKER, f"{value}{MARKER}", f"{MARKER}/{value}"):
                element.set(attribute, planted)
                yield f"{element.tag!s} {attribute}"
            element.set(attribute, value)
        element.set(MARKER, MARKER)
        child = etree.SubElement(element, f"{{http://{MARKER}}}{MARKER}")
        element.append(etree.Comment(MARKER))
        yield f"in {element.tag!s}"
        del element.attrib[MARKER]
        element.remove(element[-1])
        element.remove(child)


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.stem)
def test_a_word_planted_anywhere_in_a_domain_does_not_survive(path: Path) -> None:
    domain = _domain(path)
    places = 0
    for place in _planted(domain):
        places += 1
        if THOROUGH or places % 4 == 0:
            assert MARKER not in etree.tostring(_redacted(domain), encoding="unicode"), place
    assert places > 30


def _definitions() -> dict[str, list[etree._Element]]:
    found: dict[str, list[etree._Element]] = {}
    for name in PARTS_OF_SCHEMA:
        for define in etree.parse(SCHEMAS / f"{name}.rng").getroot().iter(f"{RNG}define"):
            found.setdefault(define.get("name", ""), []).append(define)
    return found


def _parts(
    pattern: etree._Element, definitions: dict[str, list[etree._Element]], seen: set[str]
) -> Iterator[etree._Element]:
    """The attributes and elements directly below a pattern, references followed."""
    for child in pattern.iterchildren(etree.Element):
        name = child.get("name", "")
        if child.tag in (f"{RNG}attribute", f"{RNG}element"):
            yield child
        elif child.tag == f"{RNG}ref" and name not in seen:
            seen.add(name)
            for define in definitions.get(name, []):
                yield from _parts(define, definitions, seen)
        else:
            yield from _parts(child, definitions, seen)


def _everything() -> tuple[etree._Element, int]:
    """A domain with every element of libvirt's schema below every parent that it can have, each
    attribute and text the marker; and how many places that are."""
    definitions = _definitions()
    top = definitions["domain"][0][0]
    root = etree.Element("domain")
    places = 0
    edges: set[tuple[int, int]] = set()
    alive = [top]  # lxml makes a new object, with a new id, for an element that no one holds
    todo = [(top, root)]
    while todo:
        pattern, element = todo.pop()
        element.text = MARKER
        places += 1
        for part in _parts(pattern, definitions, set()):
            alive.append(part)
            name = part.get("name")
            if name is None:
                continue
            if part.tag == f"{RNG}attribute":
                element.set(name.rpartition(":")[2], MARKER)
                places += 1
            elif (id(pattern), id(part)) not in edges:
                edges.add((id(pattern), id(part)))
                child = etree.SubElement(element, name.rpartition(":")[2])
                child.tail = MARKER
                todo.append((part, child))
    return root, places


@pytest.mark.skipif(not SCHEMAS.is_dir(), reason="libvirt's schemas are not installed")
def test_no_place_of_libvirts_schema_lets_a_word_through() -> None:
    domain, places = _everything()
    assert places > 2500
    tags = {str(element.tag) for element in domain.iter()}
    assert {"alias", "shmem", "sysinfo", "nvram", "tpm", "secret"} <= tags
    assert MARKER not in etree.tostring(_redacted(domain), encoding="unicode")


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.stem)
def test_what_a_domain_uses_is_read_from_its_redacted_form_too(path: Path) -> None:
    domain = _domain(path)
    redacted = etree.tostring(_redacted(domain)[0])
    try:
        before = read_running_domain(path.read_bytes(), True)
    except HomenodeError as error:
        pytest.fail(str(error))
    assert read_running_domain(redacted, True) == replace(before, name="redacted/vm-1", uuid=None)


@pytest.mark.parametrize(
    ("emulator", "kept"),
    [
        ("/usr/bin/qemu-system-x86_64", "/usr/bin/qemu-system-x86_64"),
        ("/usr/libexec/qemu-kvm", "/usr/libexec/qemu-kvm"),
        ("/usr/local/acmecorp/qemu", "/usr/bin/redacted"),
        ("/usr/local/bin/qemu-system-acmecorp", "/usr/bin/redacted"),
        ("/usr/bin/qemu-system-x86_64-acmecorp", "/usr/bin/redacted"),
    ],
)
def test_only_an_emulator_that_everyone_has_stays(emulator: str, kept: str) -> None:
    text = f"<domain><name>a</name><devices><emulator>{emulator}</emulator></devices></domain>"
    domain = etree.fromstring(text)
    assert _redacted(domain).findtext("domain/devices/emulator") == kept
