"""A stand-in for PyTorch, found by PYTHONPATH: GPUs that are clocks and no arithmetic."""
