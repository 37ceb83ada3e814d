"""Safe access to files that other users can change."""
