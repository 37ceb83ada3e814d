"""The table of judges, in the order of the page."""

from tests.conformance.qemu import QEMU_JUDGE
from tests.conformance.xen import XEN

JUDGES = (QEMU_JUDGE, XEN)
