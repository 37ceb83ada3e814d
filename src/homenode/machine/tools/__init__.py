"""Readers of other tools' output: one file a tool, COMMAND, records and parse()."""
