"""Evidence: benchmarks that run from a checkout and are in no wheel."""
