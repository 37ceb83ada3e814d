"""Machine: where programs run and from where a snapshot is taken: here, or in a guest."""
