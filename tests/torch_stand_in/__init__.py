"""A stand-in for PyTorch, for its folder on PYTHONPATH: GPUs that are clocks and no arithmetic."""
