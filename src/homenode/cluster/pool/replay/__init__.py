"""Replay: arrivals and departures over hosts, under several policies. Results are simulated."""
