"""Verification: does the document, a booted stand-in or the real guest match what was planned."""
