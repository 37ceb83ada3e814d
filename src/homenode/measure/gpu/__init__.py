"""GPU tests of the suite: the tests for a machine's GPUs, and their commands."""
