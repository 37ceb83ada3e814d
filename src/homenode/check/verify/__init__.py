"""Verification: does the document, a booted test guest or the real guest match what was planned."""
