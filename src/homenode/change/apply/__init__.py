"""Apply: a tuned document in the place of a domain's definition, and the way back."""
