"""Recorded runs, and the timeline of one request."""
