"""Programs: what we send, whole, to a Python with PyTorch on its standard input."""
