"""Cluster: whoever schedules: pools, pods, KubeVirt, Slurm."""
