"""KubeVirt: the hook file, the check, the kubelet's verdict."""
