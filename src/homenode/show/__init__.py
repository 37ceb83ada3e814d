"""What people see: the host on a screen, as a tree and as a picture, plans and presets as text."""
