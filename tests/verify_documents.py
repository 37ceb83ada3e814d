"""A tuned document on a small host, and ways to break it, for tests of verification."""

from functools import cache

from homenode.check.domain.verification import verify_document
from homenode.findings import Finding
from homenode.machine.topology import Host
from homenode.plan.pipeline import PlannedFile, plan_file
from homenode.vm.domain.read import open_domain
from homenode.vm.plan import Plan
from homenode.vm.plan_options import PlanOptions, Policy
from homenode.vm.sources import load_host

SMALL = "small-2n8c-2gpu"
DEVICES = ("0000:11:00.0", "0000:81:00.0")
"""A GPU on each node of the small host."""

PLAIN = b"""<domain type='kvm'>
  <name>vm</name>
  <memory unit='GiB'>4</memory>
  <vcpu placement='static'>4</vcpu>
  <os>
    <type arch='x86_64' machine='q35'>hvm</type>
  </os>
  <features>
    <acpi/>
    <apic/>
  </features>
  <cpu mode='host-passthrough'/>
  <devices>
    <controller type='pci' index='0' model='pcie-root'/>
    <hostdev mode='subsystem' type='pci' managed='yes'>
      <source>
        <address domain='0x0000' bus='0x11' slot='0x00' function='0x0'/>
      </source>
    </hostdev>
    <hostdev mode='subsystem' type='pci' managed='yes'>
      <source>
        <address domain='0x0000' bus='0x81' slot='0x00' function='0x0'/>
      </source>
    </hostdev>
  </devices>
</domain>
"""


@cache
def small_host() -> Host:
    return load_host(SMALL)


@cache
def tuned(layout: str, plain: bytes = PLAIN) -> PlannedFile:
    """The plain VM on both nodes of the small host."""
    return plan_file(
        plain, "vm.xml", PlanOptions(layout=layout, policy=Policy.SPREAD), small_host()
    )


def changed(xml: bytes, *pairs: tuple[str, str]) -> bytes:
    """The document with each first text replaced by the second, once; the first must be there."""
    for old, new in pairs:
        assert old.encode() in xml, old
        xml = xml.replace(old.encode(), new.encode(), 1)
    return xml


def swapped(xml: bytes, a: str, b: str) -> bytes:
    """The document with two texts in each other's place."""
    return changed(xml, (a, "@@"), (b, a), ("@@", b))


def findings_of(
    xml: bytes, plan: Plan | None = None, host: Host | None = None
) -> tuple[Finding, ...]:
    return verify_document(open_domain(xml, "vm.xml"), plan=plan, host=host).findings


def ids(findings: tuple[Finding, ...]) -> set[str]:
    return {finding.id for finding in findings}
