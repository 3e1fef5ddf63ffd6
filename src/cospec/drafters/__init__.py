"""How tokens are proposed: one drafter a file."""
