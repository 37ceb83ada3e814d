"""Imported runs: folders of other tools' files, found and read as runs."""
