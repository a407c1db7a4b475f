"""The door: HTTP in, tokens out."""
