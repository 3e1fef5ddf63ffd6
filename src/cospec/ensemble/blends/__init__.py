"""Combine the logits of several models into one target distribution: one kind of blend per file.

A blend of several models returns log-probabilities. The request's penalties, bias, temperature and truncation apply to
these rows as they apply to one model's logits. At temperature 0 the blend's most likely token is taken. A blend that
reads a single model equals this model.
"""
