"""The APIs: one module or folder each, from HTTP to a request in flight and back."""
