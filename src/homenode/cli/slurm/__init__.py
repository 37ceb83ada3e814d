"""The slurm commands."""
