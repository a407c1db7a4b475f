"""Iteration latency: laws, measured profiles, online learning."""
