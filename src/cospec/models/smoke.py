"""One forward pass after loading, which finds damaged weights before a request meets them."""

from __future__ import annotations

from cospec.batches import Segment, TokenBatch
from cospec.errors import ModelError
from cospec.protocols import Model
from cospec.sampling import likeliest

ID = "smoke-test"


def check_numbers(model: Model, name: str) -> None:
    """Score two tokens. A cache without room for them skips the check.

    Raises:
        ModelError: the logits are not numbers.
    """
    tokens = (0, 1 % model.vocab_size)
    model.pages.attach(ID, ())
    try:
        if not model.pages.reserve(ID, len(tokens)):
            return
        rows = model.forward(TokenBatch((Segment(ID, 0, tokens),)))
    finally:
        model.free([ID])
    if None in likeliest(rows):
        raise ModelError(f"The model {name} gives logits that are not numbers; its weights are damaged or overflow.")
