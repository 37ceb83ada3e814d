"""Programs: sent as a whole to a Python with PyTorch on its standard input."""
