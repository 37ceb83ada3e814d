"""PCIe links: their paths, rates and errors, idle or under load."""
