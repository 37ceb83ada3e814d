"""Pool: many hosts: their free resources, VMs that still fit, and the host for the next VM."""
