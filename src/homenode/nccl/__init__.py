"""NCCL and RCCL: the topology file that describes a guest's devices to their collectives."""
