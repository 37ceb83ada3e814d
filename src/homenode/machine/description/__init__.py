"""Host descriptions: a machine in a few lines of TOML, rendered to the /sys that it would have."""
