"""Output for people: the host as screen, tree and picture; plans, presets and results as text."""
