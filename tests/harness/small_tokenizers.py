"""Small tokenizers in the manner of Llama 2 and Gemma, trained on this file, and folders with them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from tokenizers import Tokenizer, decoders, normalizers, trainers
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerFast


def sentencepiece(prefix: bool) -> tuple[Tokenizer, list[str], int]:
    """A tokenizer as of Llama 2 (with a prefix) or Gemma, trained on this file; its tokens and the count of merges."""
    tokenizer = Tokenizer(BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    start = [normalizers.Prepend("▁")] if prefix else []
    tokenizer.normalizer = normalizers.Sequence([*start, normalizers.Replace(" ", "▁")])
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if prefix else steps)
    bytes_ = [f"<0x{byte:02X}>" for byte in range(256)]
    trainer = trainers.BpeTrainer(vocab_size=700, special_tokens=["<unk>", "<s>", "</s>", *bytes_], show_progress=False)
    words = Path(__file__).read_text(encoding="utf-8").replace("▁", "").split()
    tokenizer.train_from_iterator([" " + word for word in words], trainer)
    vocab = tokenizer.get_vocab()
    tokens = sorted(vocab, key=lambda token: vocab[token])
    plain = json.loads(tokenizer.to_str())
    plain["added_tokens"] = [token | {"normalized": False} for token in plain["added_tokens"] if token["id"] < 3]
    return Tokenizer.from_str(json.dumps(plain)), tokens, 3 + 256


def in_folder(folder: Path, tokenizer: Tokenizer, special: Mapping[str, str]) -> Path:
    """A folder with ``tokenizer`` and its special tokens, as transformers saves them."""
    folder.mkdir()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special).save_pretrained(folder)
    return folder
