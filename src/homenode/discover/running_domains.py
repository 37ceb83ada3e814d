"""Running domains: what the libvirt domains of a host have taken, by whoever can read their XML."""

from collections.abc import Callable

from lxml import etree

from homenode.errors import HomenodeError
from homenode.gap import Gap
from homenode.snapshot.protocol import Snapshot
from homenode.tools.xml_text import parse_xml
from homenode.topology import RunningDomain

ReadDomain = Callable[[bytes, bool, str], RunningDomain]
"""From the XML of one domain, as `virsh dumpxml` prints it, whether it runs, and what to call it in
messages, to what it uses: domain/read.py's read_running_domain. May raise HomenodeError."""


def read_running_domains(
    snapshot: Snapshot, read_domain: ReadDomain | None
) -> tuple[tuple[RunningDomain, ...], tuple[Gap, ...]]:
    """The domains of a snapshot, running and defined, by name; none with a gap where they cannot
    be known. An unreadable one is a gap: what it has taken is then unknown."""
    output = snapshot.command_output("virsh-domains")
    if output is None:
        return (), (Gap("running domains", "virsh was not there or did not answer"),)
    if not output.strip():
        return (), ()
    if read_domain is None:
        return (), (Gap("running domains", "their XML was not asked for"),)
    root = parse_xml(output, "domains", f"{snapshot.name}: virsh dumpxml")
    domains: list[RunningDomain] = []
    gaps: list[Gap] = []
    for number, child in enumerate(root, start=1):
        name = child.findtext("name") or f"number {number}"
        running = child.get("id") is not None  # libvirt gives only active domains an id
        xml = etree.tostring(child, encoding="utf-8", with_tail=False)
        try:
            domains.append(read_domain(xml, running, f"domain {name}"))
        except HomenodeError as error:
            gaps.append(Gap(f"domain {name}", error.message))
    return tuple(sorted(domains, key=lambda domain: domain.name)), tuple(gaps)
