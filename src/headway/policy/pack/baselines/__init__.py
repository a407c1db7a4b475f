"""Packers that the papers compare with."""
