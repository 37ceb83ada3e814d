"""KubeVirt: the hook that places a VM's devices, what must fit around it, and its manifests."""
