"""Tokenizers in transformers' code, loaded without torch where the folder allows."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from cospec.models.files.gguf_as_folder import is_gguf

PLAIN = "TokenizersBackend", "PreTrainedTokenizerFast"  # names of the class that reads ``tokenizer.json`` alone


def import_libraries() -> None:
    """Import what ``tokenizer_of`` needs."""
    from transformers import PreTrainedTokenizerFast  # noqa: F401


def tokenizer_of(path: str | Path, **options: Any) -> Any:
    """Load the tokenizer of a folder or a hub name.

    transformers reads the model's configuration to choose a class, and so imports torch. Many folders leave no choice:
    ``tokenizer.json`` is the whole tokenizer.

    Args:
        options: of ``from_pretrained``.

    Raises:
        Exception: of transformers' code.
    """
    folder = Path(path)
    if is_gguf(folder) or _is_plain(folder):
        from transformers import PreTrainedTokenizerFast

        return PreTrainedTokenizerFast.from_pretrained(folder, **options)
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(path, **options)


def _is_plain(folder: Path) -> bool:
    """Whether transformers would choose the class that reads ``tokenizer.json`` alone.

    Some types of models have a class of their own, whatever the tokenizer's configuration says. Llama has none.
    """
    try:
        tokenizer = json.loads((folder / "tokenizer_config.json").read_text("utf-8"))
        model = folder / "config.json"
        return (
            tokenizer.get("tokenizer_class") in PLAIN
            and "auto_map" not in tokenizer  # names code of the folder
            and (folder / "tokenizer.json").exists()
            and (not model.exists() or json.loads(model.read_text("utf-8")).get("model_type") == "llama")
        )
    except (OSError, ValueError, AttributeError, RecursionError):
        return False
