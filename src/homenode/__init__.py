"""homenode: puts every vCPU, page and GPU of a virtual machine on its home NUMA node.

The interface for Python is homenode.api (docs/reference/python.md); everything else is internal.
"""

__version__ = "0.1.0"
