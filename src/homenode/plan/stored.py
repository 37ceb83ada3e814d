"""Stored plans: written with the host they are for, and refused on another."""

from dataclasses import dataclass

from homenode import formats
from homenode.errors import InputError
from homenode.plan.fingerprint import host_fingerprint
from homenode.plan.model import Plan, Rejection, Unplannable
from homenode.topology import Host


def encode_plan(plan: Plan) -> str:
    """The homenode.plan document of a plan."""
    return formats.encode("plan", plan)


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why no placement fits, as a value to store; see Unplannable."""

    message: str
    hint: str | None
    rejections: tuple[Rejection, ...]


def encode_refusal(error: Unplannable) -> str:
    """The homenode.refusal document of a plan that could not be."""
    return formats.encode("refusal", Refusal(error.message, error.hint, error.rejections))


def read_plan(text: bytes, source: str) -> Plan:
    """The plan of a document. Raises InputError."""
    return formats.decode(text, "plan", Plan, source)


def read_plan_for(host: Host, text: bytes, source: str) -> Plan:
    """The plan of a document, made for this very host. Raises InputError for another host's."""
    plan = read_plan(text, source)
    found = host_fingerprint(host)
    if plan.host_fingerprint != found:
        raise InputError(
            f"{source}: a plan for host {plan.host_name} (topology {plan.host_fingerprint[:12]}), "
            f"found host {host.name} (topology {found[:12]})",
            hint="plan again on this host, or name the right one with --host",
        )
    return plan
