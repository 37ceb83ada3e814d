"""Pool: many hosts: what is free, which VMs still fit, where the next VM goes."""
