"""Trains the models of the zoo: tokenizer, target, distilled drafters, heads."""
