"""Comparison of a guest's own view with the expected one."""
