"""Apply: replace a domain's definition by a tuned one, and restore the original."""
