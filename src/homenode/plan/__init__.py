"""Planning: from a host and a request to a plan. Pure and deterministic."""
