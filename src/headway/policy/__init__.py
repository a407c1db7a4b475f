"""Everything that decides: pure and synchronous, without clocks, randomness or I/O."""
