"""Slurm: GPU nodes under Slurm: jobs, configuration, bindings, studies."""
