"""Libvirt domain XML: reading what a document says, and the only place that edits it."""
