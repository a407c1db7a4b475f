"""The gateway: HTTP requests in, tokens out."""
