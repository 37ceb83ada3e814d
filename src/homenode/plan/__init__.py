"""Planning: make a plan from a host and a request. Pure and deterministic."""
