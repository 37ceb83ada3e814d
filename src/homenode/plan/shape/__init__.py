"""Shape: what follows for the guest: cells, topology, PCIe tree. assemble.py is the way in."""
