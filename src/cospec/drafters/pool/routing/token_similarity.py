"""The target's output embeddings, which tell how similar two tokens are (CoSine eq. 1)."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import Any

from cospec.errors import ModelError
from cospec.models.checkpoint import weight_files

NAMES = ("lm_head.weight", "model.embed_tokens.weight")  # the second where both embeddings are one
ROWS = 4096  # rows in memory


class OutputEmbeddings:
    """Rows of a matrix in a safetensors file. The rows are read one by one, so the matrix takes no memory.

    Args:
        matrix: ``[V, H]``, a slice of an open file.
    """

    def __init__(self, matrix: Any) -> None:
        self._matrix = matrix
        self._row = lru_cache(ROWS)(self._read)

    @classmethod
    def find(cls, folder: Path | None) -> OutputEmbeddings | None:
        """Return the embeddings of the model in ``folder``; None without safetensors weights of these names."""
        from safetensors import SafetensorError, safe_open

        try:
            files = [] if folder is None else [safe_open(path, "pt") for path in weight_files(folder)]
        except (ModelError, OSError, SafetensorError):
            return None
        for name in NAMES:
            for file in files:
                if name in file.keys():  # noqa: SIM118 - no mapping
                    return cls(file.get_slice(name))
        return None

    def similarity(self, first: int, second: int) -> float:
        """Return the cosine of two tokens' rows, at least 0; 1 for equal tokens."""
        if first == second:
            return 1.0
        return max(0.0, float(self._row(first) @ self._row(second)))

    def _read(self, token: int) -> Any:
        row = self._matrix[token : token + 1].float().flatten()
        return row / row.norm().clamp_min(1e-12)
