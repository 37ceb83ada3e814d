"""Search: which nodes, cores, PUs and GPUs a VM gets. place.py is the way in."""
