"""What the gateway's journal tells: why a request was late, reports, and what would have been otherwise."""
