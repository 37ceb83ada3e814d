"""Trial: each layout defined, booted, verified, measured and undone, in a fair order."""
