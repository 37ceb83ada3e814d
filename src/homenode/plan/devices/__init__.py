"""Devices: the host functions that a VM gets, and their companions."""
