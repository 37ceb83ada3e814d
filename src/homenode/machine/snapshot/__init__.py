"""Snapshots: all data that homenode reads from a host, as one value that can be stored and sent."""
