"""Trains a byte-level BPE tokenizer on the corpus and saves a Hugging Face tokenizer folder."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from cospec.training.corpus import END

# The maths text reads "Question: ... / Answer: ...", so the chat template uses the same words.
CHAT_TEMPLATE = (
    "{% for m in messages %}"
    "{% if m['role'] == 'user' %}Question: {{ m['content'] }}\n"
    "{% elif m['role'] == 'assistant' %}Answer: {{ m['content'] }}<|endoftext|>"
    "{% else %}{{ m['content'] }}\n{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}Answer:{% endif %}"
)


def train_tokenizer(texts: Iterable[str], vocab_size: int, context: int, out: Path) -> Tokenizer:
    """Train on ``texts`` and save to ``out``. Digits are single tokens, so that numbers keep place values."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.train_from_iterator(
        texts,
        trainers.BpeTrainer(
            vocab_size=vocab_size,
            special_tokens=[END],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=None,
        eos_token=END,
        pad_token=END,
        model_max_length=context,
        clean_up_tokenization_spaces=False,
        chat_template=CHAT_TEMPLATE,
    ).save_pretrained(out)
    return tokenizer
