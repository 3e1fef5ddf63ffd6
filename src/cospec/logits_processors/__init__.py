"""The logits processors of cospec. ``core.processors`` keeps their states."""
