"""Which drafters of a pool draft for a request."""
