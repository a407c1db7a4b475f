"""Writes results as tables, JSON, plots and pages."""
