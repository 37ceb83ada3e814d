"""doctor: what is wrong with a host's links and settings and a VM's pins, and what to do."""
