"""Discovery: from a snapshot, a tree of hwloc or the output of lspci to one Host."""
