"""The logits processors of cospec, packed masks, and the states of processors along draft trees."""
