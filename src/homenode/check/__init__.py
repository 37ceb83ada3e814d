"""Check: is it so: doctor of a host, verification of one VM, watching of all."""
