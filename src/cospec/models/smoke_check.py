"""One forward pass after loading, which finds damaged weights before a request meets them."""

from __future__ import annotations

from cospec.core.interfaces import Model
from cospec.core.model_io import SequenceSlice, TokenBatch
from cospec.core.sampling import likeliest
from cospec.errors import ModelError

ID = "smoke-test"


def check_numbers(model: Model, name: str) -> None:
    """Score two tokens. A cache without room for them skips the check.

    Raises:
        ModelError: the logits are not numbers.
    """
    tokens = (0, 1 % model.vocab_size)
    model.pages.match_prefix(ID, ())
    try:
        if not model.pages.allocate(ID, len(tokens)):
            return
        rows = model.forward(TokenBatch((SequenceSlice(ID, 0, tokens),)))
    finally:
        model.free([ID])
    if None in likeliest(rows):
        raise ModelError(f"The model {name} gives logits that are not numbers; its weights are damaged or overflow.")
