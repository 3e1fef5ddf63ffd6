"""What the tests share: branching draws, slow references, engines around toy models."""
