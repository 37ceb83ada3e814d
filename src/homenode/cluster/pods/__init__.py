"""Pods: whether a node's kubelet admits a pod, which CPUs it gets, and what it could change."""
