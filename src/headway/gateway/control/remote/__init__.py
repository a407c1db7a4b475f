"""Controller and engines in other processes, as a gateway sees them."""
