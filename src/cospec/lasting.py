"""What a process of ours keeps until it ends is no work for the garbage collector."""

from __future__ import annotations

import gc


def keep() -> None:
    """Leave all that is there now out of collections.

    With torch and transformers loaded a full collection looks at 400,000 objects: 0.16 s in which no round is run. For
    processes that serve one thing until they end; what is kept is never given back.
    """
    gc.collect()
    gc.freeze()
