"""What a guest reports of itself against what was expected of it."""
