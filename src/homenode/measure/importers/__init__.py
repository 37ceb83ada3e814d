"""Importers: a module for each tool whose logs `homenode import` reads, and in it an OUTPUT."""

from pkgutil import iter_modules

NAMES = tuple(sorted(module.name for module in iter_modules(__path__)))
"""Names of the modules."""
