"""A test guest, booted and read with homenode's own discovery."""
