"""Trial: define, boot, verify, measure and undo each layout, in a seeded order."""
