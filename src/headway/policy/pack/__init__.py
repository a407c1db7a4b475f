"""Packers: what one engine runs in its next iteration."""
