"""How drafts are judged: one rule a file."""
