"""Words: a plan in sentences and tables. explain.py is the way in."""
