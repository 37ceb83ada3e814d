"""Devices: which functions of the host a VM gets, and what goes with them."""
