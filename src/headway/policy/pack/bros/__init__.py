"""BROS (sections 4 and 5): real-time and best-effort requests on one engine."""
