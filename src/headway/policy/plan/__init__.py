"""Planners: which instance gets which request, in what order."""
