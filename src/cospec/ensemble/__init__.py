"""Several models, one distribution."""
