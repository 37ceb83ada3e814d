"""Targets: hypervisors besides libvirt that a plan is written for, one file each."""
