"""Slurm of the tests' own: a real one on this machine, its nodes and their GPUs declared."""
