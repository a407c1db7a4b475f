"""Stores of files, batches and their lines: a directory, or PostgreSQL."""
