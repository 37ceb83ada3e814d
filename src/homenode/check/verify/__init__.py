"""Verification: compares the definition, a booted test guest or the real guest with the plan."""
