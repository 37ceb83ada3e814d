"""KubeVirt: the hook, the check."""
