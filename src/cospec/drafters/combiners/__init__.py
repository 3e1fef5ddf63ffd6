"""How the drafts of several drafters become one: one combiner a file."""
