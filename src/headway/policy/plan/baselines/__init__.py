"""Planners that the papers compare with."""
