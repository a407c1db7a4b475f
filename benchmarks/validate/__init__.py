"""Validation of the simulator against the real engine."""
