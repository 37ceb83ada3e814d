"""A domain by itself, on the host that it is for, and against its plan."""
