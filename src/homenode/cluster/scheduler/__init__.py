"""Scheduler: what kube-scheduler and Nova ask of a pool, and where what runs is read."""
