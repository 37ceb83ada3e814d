"""Start: a real VM started paused, and what its host and QEMU then say."""
