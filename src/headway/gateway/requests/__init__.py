"""The life of one request: its path to an engine and back, background work, ends, recovery."""
