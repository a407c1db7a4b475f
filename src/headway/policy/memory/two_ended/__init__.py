"""Two-ended KV blocks (BROS 5)."""
