"""GPU tests of the suite: which run on a machine's GPUs, and the commands for them."""
