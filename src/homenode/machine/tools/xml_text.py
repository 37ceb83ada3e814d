"""XML output of tools, parsed as untrusted text.

A DOCTYPE is ordinary (nvidia-smi writes one) and nothing is loaded for it; its own entities are
rejected.
"""

import re

from lxml import etree

from homenode.errors import InputError, ParseError

MAX_CHARS = 64 << 20
"""nvidia-smi -q -x is 25 KB a GPU, the XML of a domain is 10 KB."""

_DECLARATION = re.compile(r"\A\s*<\?xml[^>]*\?>")


def parse_xml(text: str, root: str, source: str) -> etree._Element:
    """Return the root element of a document, which must be named `root`. Comments and processing
    instructions are omitted. Raises ParseError."""
    if len(text) > MAX_CHARS:
        raise InputError(f"{source}: expected at most {MAX_CHARS} characters, found {len(text)}")
    # Drop the declaration: a decoded text has no encoding.
    body = _DECLARATION.sub("", text, count=1).strip()
    if "<!ENTITY" in body or "<?xml " in body:
        raise ParseError(source, "XML without entity declarations", body)
    parser = etree.XMLParser(
        encoding="utf-8",
        resolve_entities=False,
        load_dtd=False,
        no_network=True,
        huge_tree=False,
        remove_comments=True,
        remove_pis=True,
    )
    try:
        element = etree.fromstring(body.encode("utf-8", "replace"), parser)
    except etree.XMLSyntaxError as error:
        raise ParseError(source, "well-formed XML", error.msg, line=error.position[0]) from None
    if element.tag != root:
        raise ParseError(source, f"<{root}>", f"<{element.tag}>")
    return element
