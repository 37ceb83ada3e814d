"""A running VM, as the host's kernel shows it, against what it was planned to be."""
