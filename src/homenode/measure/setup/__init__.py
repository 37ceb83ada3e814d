"""Setup of GPU tools: planned, carried out with a record, undone."""
