"""Cluster: pools of hosts, KubeVirt and Slurm."""
