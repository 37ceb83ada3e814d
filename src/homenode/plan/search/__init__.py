"""Search: choose nodes, cores, CPUs and GPUs for a VM. Entry point: place.py."""
