"""Which drafters of a pool work for a request: one routing a file."""
