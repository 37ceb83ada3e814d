"""A domain document against itself, the host that it is for, and its plan."""
