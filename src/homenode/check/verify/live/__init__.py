"""Comparison of a running VM, as the host's kernel shows it, with its plan."""
