"""NCCL and RCCL: the topology file that gives a guest's collectives where its devices are."""
