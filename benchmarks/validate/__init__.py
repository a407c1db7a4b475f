"""The simulator against the real engine."""
