"""NCCL and RCCL: the topology file that tells a guest's collectives where its devices are."""
