"""SiteChecks: checks of a host that other distributions register. [I/O]

A distribution adds a finding with an entry point of the group homenode.findings and a package:

    [project.entry-points."homenode.findings"]
    racks = "our_racks.checks:check"

`check(host)` makes findings with homenode.catalogue.finding; their texts are the pages (*.md) next
to the module, in the form of docs/findings. `homenode doctor` runs each check.
"""

from collections.abc import Callable, Iterable, Iterator
from typing import cast

from homenode.catalogue import GROUP
from homenode.findings import Finding
from homenode.machine.topology import Host
from homenode.plugins import loaded, refused, registered


def site_findings(host: Host) -> Iterator[Finding]:
    """What the registered checks find. Raises InputError, which names the distribution, for one
    that fails."""
    for one in registered(GROUP).values():
        check = cast("Callable[[Host], Iterable[Finding]]", loaded(one, "a check"))
        try:
            found = list(check(host))
        except Exception as error:
            # What another distribution's check raises is not known, and its name is what helps.
            wrong = f"{type(error).__name__}: {error}"
            raise refused(one, "a check that takes a host and gives findings", wrong) from error
        for each in found:
            if not isinstance(each, Finding):
                raise refused(one, "findings", type(each).__name__)
            yield each
