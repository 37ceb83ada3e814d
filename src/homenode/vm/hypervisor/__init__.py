"""Hypervisor: reading and changing domains through libvirt."""
