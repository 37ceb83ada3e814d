"""doctor: findings on a host's links and settings and a VM's pins, with their fixes."""
