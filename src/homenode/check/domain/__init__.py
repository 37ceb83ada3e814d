"""Checks of a domain: its consistency, its host, and its plan."""
