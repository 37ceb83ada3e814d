"""Spool: the folder of a node where the hooks keep what they saw of jobs."""

SPOOL = "/var/spool/homenode-slurm"
