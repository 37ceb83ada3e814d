"""Check: doctor of a host, verification of a VM."""
