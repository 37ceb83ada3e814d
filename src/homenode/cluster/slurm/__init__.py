"""Slurm: GPU nodes as a scheduler shares them out: jobs, configuration, bindings, studies."""
