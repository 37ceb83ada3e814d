"""Start: whether a VM would start on this machine: what it needs of it, and what is there."""
