"""Imported runs: directories of other tools' files, found and read as runs."""
