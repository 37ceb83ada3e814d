"""The proof that a plan carries: what it states, how it is made, how it is checked."""
