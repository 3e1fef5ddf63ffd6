"""Tokenizers in transformers' code, loaded without torch where the folder allows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from cospec.models.checkpoint import ZOO
from cospec.models.files.gguf_as_folder import is_gguf


def import_libraries() -> None:
    """Import what ``tokenizer_of`` needs."""
    from transformers import PreTrainedTokenizerFast  # noqa: F401


def tokenizer_of(path: str | Path, **options: Any) -> Any:
    """Load the tokenizer of a folder or a hub name.

    transformers reads the model's configuration to choose a class, and so imports torch. In folders that cospec made,
    ``tokenizer.json`` is the whole tokenizer and needs no choice.

    Args:
        options: of ``from_pretrained``.

    Raises:
        Exception: of transformers' code.
    """
    folder = Path(path)
    if is_gguf(folder) or folder.parent == ZOO:
        from transformers import PreTrainedTokenizerFast

        return PreTrainedTokenizerFast.from_pretrained(folder, **options)
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(path, **options)
