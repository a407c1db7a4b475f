"""Helpers that tests of several folders use, and engines to step."""
