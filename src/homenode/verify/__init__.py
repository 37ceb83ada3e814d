"""Verification: does the document, a booted stand-in or the real guest match what was planned."""

from homenode.callable_package import make_callable

make_callable(__name__)
