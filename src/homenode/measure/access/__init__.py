"""Machines: run programs and read snapshots locally, on another host, or in a guest."""
