"""Edits: replace a few bytes of a document and keep the rest.

A step makes edits against one document and `apply` gives the next document. New elements take the
indentation, the line ends and the quotes that the document already has.
"""

import re
from collections.abc import Iterable, Mapping
from types import MappingProxyType

from msgspec import Struct

from homenode.vm.domain.document import ORDER, Document, Element, parse_document

_BLANK = b" \t\r\n"
_COMMENT_ON_LINE = re.compile(rb"(?:[ \t]*<!--(?:[^\r\n-]|-(?!->))*-->)+[ \t]*(?=[\r\n]|\Z)")


class Edit(Struct, frozen=True):
    """text[start:end] becomes `new`."""

    start: int
    end: int
    new: bytes


Attributes = Mapping[str, str | None]


class NewElement(Struct, frozen=True):
    """An element to be written: with text, or with children. A None attribute is omitted."""

    name: str
    attributes: Attributes = MappingProxyType({})
    children: tuple["NewElement", ...] = ()
    text: str | None = None


def apply(document: Document, edits: Iterable[Edit]) -> Document:
    """Return the document after the edits. Insertions at one place keep their order. Edits must not
    overlap: a step with overlapping edits is a bug."""
    ordered_edits = sorted(edits, key=lambda edit: (edit.start, edit.end))
    if not ordered_edits:
        return document
    parts: list[bytes] = []
    offset = 0
    for edit in ordered_edits:
        assert edit.start >= offset, f"edits overlap at byte {edit.start}"
        parts += (document.text[offset : edit.start], edit.new)
        offset = edit.end
    parts.append(document.text[offset:])
    # The result is parsed from bytes, under the same rules as the input.
    result = Document(b"".join(parts), document.root, "", document.codec, document.mark)
    return parse_document(result.to_bytes(), document.source)


def set_attribute(document: Document, element: Element, name: str, value: str) -> list[Edit]:
    """Return edits that set an attribute; none if it has the value."""
    if element.get(name) == value:
        return []
    spans = document.attribute_spans(element)
    span = spans.get(name)
    if span is not None:
        return [Edit(span.value_start, span.value_end, escape_xml(value, span.quote))]
    offset = max((s.end for s in spans.values()), default=element.start + 1 + len(element.tag))
    attribute_text = f" {name}={document.quote}".encode() + escape_xml(value, document.quote)
    return [Edit(offset, offset, attribute_text + document.quote.encode())]


def drop_attribute(document: Document, element: Element, name: str) -> list[Edit]:
    """Return edits that remove an attribute; none if it is missing."""
    span = document.attribute_spans(element).get(name)
    return [] if span is None else [Edit(span.start, span.end, b"")]


def set_attributes(document: Document, element: Element, values: Attributes) -> list[Edit]:
    """Return edits that set each attribute, or remove it if its value is None."""
    edits: list[Edit] = []
    for name, value in values.items():
        if value is None:
            edits += drop_attribute(document, element, name)
        else:
            edits += set_attribute(document, element, name, value)
    return edits


def set_text(document: Document, element: Element, text: str) -> list[Edit]:
    """Return edits that set the text of a childless element; white space around it is kept."""
    if element.closes_itself:
        open_tag = _open_tag(document, element)
        closing = f"</{element.tag}>".encode()
        return [Edit(open_tag.start, open_tag.end, open_tag.new + escape_xml(text) + closing)]
    content = document.text[element.tag_end : element.content_end]
    bare = content.strip(_BLANK)
    start = element.tag_end + content.find(bare)
    if b"<" in bare:  # a comment or CDATA next to the text: no single place to write
        return [Edit(element.tag_end, element.content_end, escape_xml(text))]
    return [Edit(start, start + len(bare), escape_xml(text))]


def remove(document: Document, element: Element) -> list[Edit]:
    """Return edits that remove an element, with its line if nothing else is on it."""
    before = _find_indent_before(document, element.start)
    after = document.text[element.end : element.end + 1]
    alone = after in b"\r\n<"  # or at the end
    start = element.start - len(_extend_to_line(before)) if alone else element.start
    return [Edit(start, element.end, b"")]


def is_bare(document: Document, element: Element) -> bool:
    """Return whether an element is empty: no child, text or comment."""
    return not document.text[element.tag_end : element.content_end].strip(_BLANK)


def close_up(document: Document, element: Element) -> list[Edit]:
    """Return edits that write an empty element as one tag."""
    if element.closes_itself or not is_bare(document, element):
        return []
    return [Edit(element.tag_end - 1, element.end, b"/>")]


def append(document: Document, parent: Element, new: Iterable[NewElement]) -> list[Edit]:
    nodes = tuple(new)
    if not nodes:
        return []
    if parent.children:
        return insert_after(document, parent.children[-1], nodes)
    outer = _extend_to_line(_find_indent_before(document, parent.start))
    step = _find_indent(document, parent)
    inner = outer + step if outer else b""
    new_text = b"".join(inner + _render(node, document, inner, step) for node in nodes)
    if parent.closes_itself:
        open_tag = _open_tag(document, parent)
        closing = outer + f"</{parent.tag}>".encode()
        return [Edit(open_tag.start, open_tag.end, open_tag.new + new_text + closing)]
    content = document.text[parent.tag_end : parent.content_end]
    offset = parent.tag_end + len(content.rstrip(_BLANK))
    tail = b"" if b"\n" in document.text[offset : parent.content_end] else outer
    return [Edit(offset, offset, new_text + tail)]


def insert_after(document: Document, sibling: Element, new: Iterable[NewElement]) -> list[Edit]:
    """Return edits that insert new elements after a sibling and the comment on its line."""
    line = _extend_to_line(_find_indent_before(document, sibling.start))
    step = _find_indent(document, sibling)
    new_text = b"".join(line + _render(node, document, line, step) for node in new)
    comment = _COMMENT_ON_LINE.match(document.text, sibling.end)
    offset = comment.end() if comment and line else sibling.end
    return [Edit(offset, offset, new_text)] if new_text else []


def insert_before(document: Document, sibling: Element, new: Iterable[NewElement]) -> list[Edit]:
    line = _extend_to_line(_find_indent_before(document, sibling.start))
    step = _find_indent(document, sibling)
    new_text = b"".join(_render(node, document, line, step) + line for node in new)
    return [Edit(sibling.start, sibling.start, new_text)] if new_text else []


def transplant(
    document: Document,
    parent: Element,
    after: Element | None,
    source: Document,
    elements: Iterable[Element],
) -> list[Edit]:
    """Edits that insert elements of another document after a child; None = before all."""
    new_text = b"".join(
        _extend_to_line(_find_indent_before(source, element.start))
        + source.text[element.start : element.end]
        for element in elements
    )
    if after is not None:
        return [Edit(after.end, after.end, new_text)]
    if not parent.closes_itself:
        return [Edit(parent.tag_end, parent.tag_end, new_text)]
    outer = _extend_to_line(_find_indent_before(document, parent.start))
    open_tag = _open_tag(document, parent)
    closing = outer + f"</{parent.tag}>".encode()
    return [Edit(open_tag.start, open_tag.end, open_tag.new + new_text + closing)]


def insert_in_order(document: Document, parent: Element, new: NewElement) -> list[Edit]:
    """Return edits that insert an element among its siblings in libvirt's ORDER."""
    order = ORDER.get(parent.name, ())
    if new.name in order:
        names = order[: order.index(new.name)]
        siblings = [child for child in parent.children if child.name in names]
        if siblings:
            return insert_after(document, siblings[-1], [new])
        if parent.children:
            return insert_before(document, parent.children[0], [new])
    return append(document, parent, [new])


def insert_at(document: Document, path: str, new: NewElement) -> Document:
    """Return the document with a new element in the element at a path below the root, in order.
    Missing elements of the path are created."""
    parent = document.root
    names = path.split("/") if path else []
    for depth, name in enumerate(names):
        child = parent.child(name)
        if child is None:
            for missing in reversed(names[depth:]):
                new = NewElement(missing, children=(new,))
            break
        parent = child
    return apply(document, insert_in_order(document, parent, new))


def edit_attributes(document: Document, path: str, values: Attributes) -> Document:
    """Return the document with these attributes set at a path; a missing element is created."""
    element = document.root.find(path)
    if element is not None:
        return apply(document, set_attributes(document, element, values))
    parent_path, _, name = path.rpartition("/")
    return insert_at(document, parent_path, NewElement(name, values))


def remove_all(document: Document, elements: Iterable[Element]) -> Document:
    """Return the document without some elements, none of which contains another."""
    return apply(document, [edit for element in elements for edit in remove(document, element)])


def prune(document: Document, element: Element) -> Document:
    """Return the document without an element; parents that become empty are removed too."""
    around = document.parent_of[element.start]
    document = remove_all(document, [element])
    (parent,) = (candidate for candidate in document.root.walk() if candidate.start == around.start)
    if is_bare(document, parent) and not parent.attributes:
        return remove_all(document, [parent])
    return apply(document, close_up(document, parent))


def _find_indent_before(document: Document, offset: int) -> bytes:
    head = document.text[max(0, offset - 4096) : offset]
    return head[len(head.rstrip(_BLANK)) :]


def _extend_to_line(blank: bytes) -> bytes:
    """Return white space from its last line break on; empty without a line break."""
    at = blank.rfind(b"\n")
    if at < 0:
        return b""
    return blank[at - 1 if blank[at - 1 : at] == b"\r" else at :]


def _find_indent(document: Document, element: Element) -> bytes:
    """Return one level of indentation, as around this element."""
    ancestor: Element | None = element
    while ancestor is not None:
        parent = document.parent_of.get(ancestor.start)
        inner = _extend_to_line(_find_indent_before(document, ancestor.start))
        if parent is not None and inner:
            outer = (
                _extend_to_line(_find_indent_before(document, parent.start))
                or inner[: inner.find(b"\n") + 1]
            )
            if len(inner) > len(outer) and inner.startswith(outer):
                return inner[len(outer) :]
        ancestor = parent
    return b"  "


def _render(node: NewElement, document: Document, line: bytes, step: bytes) -> bytes:
    quote = document.quote
    head = f"<{node.name}".encode()
    for name, value in node.attributes.items():
        if value is not None:
            head += f" {name}={quote}".encode() + escape_xml(value, quote) + quote.encode()
    if node.text is not None:
        return head + b">" + escape_xml(node.text) + f"</{node.name}>".encode()
    if not node.children:
        return head + b"/>"
    inner = line + step if line else b""
    children = b"".join(inner + _render(child, document, inner, step) for child in node.children)
    return head + b">" + children + line + f"</{node.name}>".encode()


def _open_tag(document: Document, element: Element) -> Edit:
    """Return the edit that turns "/>" into ">"."""
    tag = document.text[element.start : element.tag_end]
    return Edit(element.start + len(tag[:-2].rstrip(_BLANK)), element.tag_end, b">")


def escape_xml(text: str, quote: str = "") -> bytes:
    """Escape a text as ASCII XML, which is valid in every encoding.

    >>> escape_xml("a'b", "'"), escape_xml("a'b", '"'), escape_xml('a"b', '"')
    (b'a&apos;b', b"a'b", b'a&quot;b')
    """
    xml = text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    if quote:
        xml = xml.replace(quote, "&apos;" if quote == "'" else "&quot;")
        xml = re.sub(r"[\t\r\n]", lambda match: f"&#{ord(match[0])};", xml)
    return xml.encode("ascii", "xmlcharrefreplace")
