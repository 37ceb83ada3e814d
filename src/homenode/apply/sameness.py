"""Sameness: whether two printed definitions are one, whatever order libvirt printed them in.

libvirt prints the controllers that it added itself where it added them, and sorted by type and
index once it has read its own file again: after a redefinition, or after the daemon was started
anew. Seen with libvirt 9.0; source: virDomainControllerInsert, src/conf/domain_conf.c.
"""

from homenode.domain.document import Element, parse_document

_Tree = tuple[str, tuple[tuple[str, str], ...], str, tuple["_Tree", ...]]


def same_definition(one: bytes, other: bytes) -> bool:
    """True where both say the same. Devices may come in another order by type, and controllers in
    any; two disks, NICs or cells may not. Raises ParseError or InputError for what is no XML."""
    if one == other:
        return True
    first, second = parse_document(one, "definition"), parse_document(other, "definition")
    return _tree(first.root, is_devices=False) == _tree(second.root, is_devices=False)


def _tree(element: Element, *, is_devices: bool) -> _Tree:
    children = [
        _tree(child, is_devices=element.name == "domain" and child.name == "devices")
        for child in element.children
    ]
    if is_devices:
        children.sort(key=lambda child: (child[0], child if child[0] == "controller" else ()))
    # White space beside elements is layout; without any it is the value.
    text = element.text.strip() if element.children else element.text
    return element.name, tuple(sorted(element.attributes)), text, tuple(children)
