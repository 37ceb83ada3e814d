"""Pool: many hosts and many VMs: what still fits, where the next VM goes."""
