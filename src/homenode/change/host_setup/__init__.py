"""Host setup: what a set of plans needs of its host, as files that can be installed and undone."""
