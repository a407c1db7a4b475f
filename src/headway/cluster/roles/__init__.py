"""`headway gateway`, `controller` and `agent`: Headway's parts as separate processes."""
