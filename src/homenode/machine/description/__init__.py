"""Host descriptions: a machine in a few lines of TOML."""
