"""Hypervisor: what libvirt says of its domains, and how it is told to change them."""
