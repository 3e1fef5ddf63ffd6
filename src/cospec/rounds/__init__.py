"""In which order drafting and verification happen: one round a file."""
