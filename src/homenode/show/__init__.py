"""What people see: the host as a tree and as a picture, plans and presets as text."""
