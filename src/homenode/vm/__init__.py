"""A VM as described by any source: domain XML, plan, target file, process or guest."""
