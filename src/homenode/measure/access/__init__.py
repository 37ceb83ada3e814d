"""Machines: where programs run and snapshots are read: here, on another host, in a guest."""
