"""Several drafters as one: who takes part, what they say, how it is put together, what is learned from it."""
