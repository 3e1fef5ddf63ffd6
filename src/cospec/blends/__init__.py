"""How the logits of several models become those of one law: one blend a file."""
