"""Targets: hypervisors other than libvirt's that a plan is written for, one file each."""
