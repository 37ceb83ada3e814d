"""Evidence: the one store: published figures as data, imported results, own runs."""
