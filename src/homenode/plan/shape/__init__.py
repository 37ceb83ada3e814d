"""Shape: the guest's cells, topology and PCIe tree. Entry point: assemble.py."""
