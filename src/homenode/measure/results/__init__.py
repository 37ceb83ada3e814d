"""Results: samples, their layout, and their storage."""
