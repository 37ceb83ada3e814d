"""Machine: the host's sources, and its record."""
