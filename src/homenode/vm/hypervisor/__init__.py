"""Hypervisor: what libvirt says of its domains, and how it is asked to change them."""
