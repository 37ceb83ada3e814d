"""KubeVirt: the hook that places a VM's devices, the checks of VMIs, and the manifests."""
