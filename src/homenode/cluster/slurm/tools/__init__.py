"""Tools of Slurm: commands, records and parsers."""
