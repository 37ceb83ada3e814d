"""homenode: every vCPU, page and GPU of a virtual machine on its home NUMA node."""

__version__ = "0.1.0"
