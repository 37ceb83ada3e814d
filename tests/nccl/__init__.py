"""NCCL: files against versions, and against the host."""
