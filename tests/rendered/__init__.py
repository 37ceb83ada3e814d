"""False trees of /sys: the files and outputs of a machine that a host.toml describes."""
