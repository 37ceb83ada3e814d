"""Machine: the host: what it is read from, and the record of it."""
