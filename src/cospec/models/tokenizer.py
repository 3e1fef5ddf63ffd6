"""Loads the tokenizer of a model's folder."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from cospec.errors import ModelError
from cospec.models.hf_logging import hf_logging_off
from cospec.models.hf_weights import first_line
from cospec.models.lora import base_folder

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def load_tokenizer(folder: Path) -> PreTrainedTokenizerBase:
    """Load the tokenizer of a model's folder; an adapter without a tokenizer has its base's.

    Raises:
        ModelError: no tokenizer exists, or its reading would run code of the folder.
    """
    from transformers import AutoTokenizer

    folder = folder if (folder / "tokenizer_config.json").exists() else base_folder(folder)
    with hf_logging_off():
        try:
            tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
                folder, trust_remote_code=False, local_files_only=True
            )
        except Exception as error:
            # Many libraries read tokenizers and may raise anything.
            raise ModelError(f"The folder {folder} has no tokenizer that can be read: {first_line(error)}.") from error
    return tokenizer
