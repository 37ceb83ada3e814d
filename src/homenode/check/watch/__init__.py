"""Watch: what has changed on a host and its VMs since they were certified, as few alerts."""
