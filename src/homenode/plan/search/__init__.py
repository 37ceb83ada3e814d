"""Search: which nodes, cores, CPUs and GPUs a VM gets. place.py is the way in."""
