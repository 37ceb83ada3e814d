"""Machine: where programs run and from where a snapshot is in_use: here, or in a guest."""
