"""A test guest of the guest, booted and read with homenode's own discovery."""
