"""Trial: each layout defined, booted, verified, measured and taken back, in a fair order."""
