"""XmlEquivalence: whether two printed definitions are one, whatever order libvirt printed them in.

libvirt prints the controllers that it added itself where it added them, and sorted by type and
index once it has read its own file again: after a redefinition, or after the daemon was started
again. Seen with libvirt 9.0; source: virDomainControllerInsert, src/conf/domain_conf.c.
"""

from homenode.vm.domain.document import Element, parse_document

Tree = tuple[str, tuple[tuple[str, str], ...], str, tuple["Tree", ...]]


def same_definition(one: bytes, other: bytes) -> bool:
    """True where both say the same. Devices may come in another order by type, and controllers in
    any; two disks, NICs or cells may not. Raises ParseError or InputError for what is no XML."""
    if one == other:
        return True
    first, second = parse_document(one, "definition"), parse_document(other, "definition")
    return tree_of(first.root) == tree_of(second.root)


def tree_of(element: Element, *, is_devices: bool = False) -> Tree:
    """An element as a value: equal where two elements say the same. is_devices: it is <devices>."""
    children = [
        tree_of(child, is_devices=element.name == "domain" and child.name == "devices")
        for child in element.children
    ]
    if is_devices:
        children.sort(key=lambda child: (child[0], child if child[0] == "controller" else ()))
    # White space next to elements is layout; without any it is the value.
    text = element.text.strip() if element.children else element.text
    return element.name, tuple(sorted(element.attributes)), text, tuple(children)
