"""Results: what was measured, under which layout, and where it is kept."""
