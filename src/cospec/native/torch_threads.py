"""Limits torch to one thread while the native kernels use the processors."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def one_torch_thread(native: bool = True) -> Iterator[None]:
    """Limit torch to one thread; nothing changes unless ``native``.

    Torch handles only a few rows of logits between native forwards. Torch's workers spin for milliseconds after each
    large operation, on the processors that the kernels need. Rows are computed bit by bit alike on every number of
    threads.

    Args:
        native: whether all forwards in the context are native.
    """
    before = torch.get_num_threads()
    if native:
        torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
