"""Change: steps that a host is changed by, each written down before it is done, and undone."""
