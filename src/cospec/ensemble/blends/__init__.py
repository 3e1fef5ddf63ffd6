"""How the logits of several models become those of one law: one blend a file.

What a blend of several models gives are log-probabilities. The request's penalties, bias, temperature and truncation
apply to these as they apply to the logits of a single model; at temperature 0 the blend's likeliest token is taken. A
blend that only one model has a part in is that model.
"""
