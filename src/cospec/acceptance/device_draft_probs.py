"""The distributions of drawn tokens on the device that drew them, which the host copies only if it reads them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, cast

import numpy as np
from numpy.lib.mixins import NDArrayOperatorsMixin
from numpy.typing import NDArray

if TYPE_CHECKING:  # types need no torch
    from torch import Tensor

    from cospec.rng.random_streams import Floats


class DeviceProbs(NDArrayOperatorsMixin):
    """Stands for an array ``[..., V]`` of ``Draft.q`` or ``RolloutOutput.q``. The array is large: 1.2 MB a token of a
    vocabulary of 151,936. A verifier on the same device reads ``rows``, so that nothing is copied. All other readers
    use this object as the array, which is then copied.

    Attributes:
        rows: ``[..., V]``, float64.
        chosen: ``[...]``, the probability of each drawn token, on the host.
    """

    def __init__(self, rows: Tensor, chosen: Floats) -> None:
        self.rows, self.chosen = rows, chosen
        self._host: Floats | None = None

    def as_floats(self) -> Floats:
        """Return this object as the array that it stands for."""
        return cast("Floats", self)

    @property
    def shape(self) -> tuple[int, ...]:
        """See ``numpy.ndarray``."""
        return tuple(self.rows.shape)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, key: Any) -> Any:
        """Return distributions on the device for a key of leading dimensions, else numbers on the host."""
        keys = key if isinstance(key, tuple) else (key,)
        if len(keys) >= len(self.shape) or any(each is None or each is Ellipsis for each in keys):
            return np.asarray(self)[key]
        if self.rows.is_cuda:
            self._keep_for_this_stream()
        found = DeviceProbs(self.rows[key], np.asarray(self.chosen[key]))
        found._host = None if self._host is None else self._host[key]
        return found

    def __iter__(self) -> Iterator[Any]:
        return (self[place] for place in range(len(self)))

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> NDArray[Any]:
        """Copy the distributions to the host, once."""
        if self._host is None:
            self._host = self.rows.cpu().numpy()
        return np.array(self._host, dtype=dtype) if copy else np.asarray(self._host, dtype=dtype)

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **options: Any) -> Any:
        """Compute with the array on the host."""
        arrays = [np.asarray(each) if isinstance(each, DeviceProbs) else each for each in inputs]
        return getattr(ufunc, method)(*arrays, **options)

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of the array on the host, such as ``max``."""
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(np.asarray(self), name)

    def _keep_for_this_stream(self) -> None:
        """Keep the memory until work of the current stream is done: a drafter in a thread has a stream of its own."""
        import torch

        self.rows.record_stream(torch.cuda.current_stream(self.rows.device))
