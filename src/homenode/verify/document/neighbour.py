"""Neighbour: a running domain of the host that is not the VM in question, as far as names show."""

from homenode.findings import Severity
from homenode.topology import RunningDomain


def neighbour(domain: RunningDomain) -> str:
    """What to call it; where a capture redacted its name it may be the VM itself."""
    doubt = " (name redacted: it may be this very VM)" if domain.has_pseudonym else ""
    return f"running domain {domain.name!r}{doubt}"


def severity_of_neighbour(domain: RunningDomain, severity: Severity) -> Severity:
    """The severity of a clash with it: nothing is sure of a domain whose name is redacted."""
    return Severity.INCONCLUSIVE if domain.has_pseudonym else severity
