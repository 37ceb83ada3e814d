"""Snapshots: everything that homenode reads of a host, as one value that can be stored and sent."""
