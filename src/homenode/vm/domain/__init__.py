"""Libvirt domain XML: reading definitions, and the only code that edits them."""
