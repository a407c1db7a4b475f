"""Load generation and the metrics of recorded requests."""
