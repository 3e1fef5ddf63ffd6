"""The order of drafting and verification."""
