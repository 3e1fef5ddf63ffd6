"""The law of one model: its own distribution (spec section 2, ``single``)."""

from __future__ import annotations

from collections.abc import Sequence as Seq

from torch import Tensor


class Single:
    """The identity blend; the response declares it as ``target``."""

    name = "target"

    def combine(self, logits: Seq[Tensor]) -> Tensor:
        """The only member of ``logits``, ``[R, V]``."""
        (only,) = logits
        return only
