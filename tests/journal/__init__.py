"""The journal's files."""
