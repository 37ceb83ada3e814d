"""Files of other people: how they are read, written and judged."""
