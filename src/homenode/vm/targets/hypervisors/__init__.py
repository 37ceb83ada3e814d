"""Hypervisors: a module for each target of homenode, and in it a TARGET."""

from pkgutil import iter_modules

NAMES = tuple(sorted(module.name for module in iter_modules(__path__)))
"""Names of the targets, which are their modules' names."""
