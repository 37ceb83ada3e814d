"""Findings: what the user should know of a placement that works."""
