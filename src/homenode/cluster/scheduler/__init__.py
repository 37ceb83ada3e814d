"""Scheduler: which devices claims of the API server have."""
