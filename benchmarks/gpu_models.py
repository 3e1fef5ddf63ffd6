"""Models with random weights in the shapes of Qwen3 on one device, for ``benchmarks.gpu``.

A drafter has the first layers of its target, and the same embedding, norm and output layer. The later layers of the
target get smaller output weights until the next-token distributions of both models overlap by a given amount. Then a
share of the drafts is accepted, as with trained models.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import AutoModelForCausalLM, GenerationConfig, PreTrainedTokenizerFast, Qwen3Config

from benchmarks.gguf_files import MODELS, Model
from benchmarks.peers import END
from cospec.models.hf_logging import hf_logging_off

OVERLAP = 0.75  # sum over tokens of the smaller probability of target and drafter
TRIES = 6  # forwards of the bisection
PROBES = (2, 32)  # sequences and tokens of a forward of the bisection
POSITIONS = 4096  # the longest sequence


@dataclass(frozen=True, slots=True)
class Shape(Model):
    """A shape of Qwen3; ``tied`` means that the output layer is the embedding."""

    tied: bool
    draft_layers: int

    @property
    def weights_read(self) -> int:
        """Weights of all linear layers and the output layer, which a step reads once."""
        attention = self.hidden * self.head_dim * 2 * (self.heads + self.kv_heads)
        return self.layers * (attention + 3 * self.hidden * self.inner) + self.vocabulary * self.hidden

    @property
    def cache_entries(self) -> int:
        """Numbers in the KV cache per token."""
        return 2 * self.layers * self.kv_heads * self.head_dim

    @property
    def drafter(self) -> Shape:
        """The shape of the drafter."""
        return replace(self, name=f"{self.name}-drafter", layers=self.draft_layers)

    def config(self) -> Any:
        """Return the model's configuration for transformers."""
        return Qwen3Config(
            hidden_size=self.hidden, num_hidden_layers=self.layers, intermediate_size=self.inner,
            num_attention_heads=self.heads, num_key_value_heads=self.kv_heads, head_dim=self.head_dim,
            vocab_size=self.vocabulary, max_position_embeddings=POSITIONS, tie_word_embeddings=self.tied,
            bos_token_id=0, eos_token_id=1, dtype="bfloat16",
        )  # fmt: skip


SHAPES = {
    shape.name: shape
    for shape in (
        Shape("Qwen3-0.6B", "qwen3", 1024, 28, 3072, 16, 8, 151936, 128, True, 4),
        Shape(**asdict(MODELS["Qwen3-1.7B"]), tied=True, draft_layers=4),
        Shape("Qwen3-8B", "qwen3", 4096, 36, 12288, 32, 8, 151936, 128, False, 4),
        Shape("tiny", "qwen3", 64, 2, 128, 4, 2, 600, 16, True, 1),
    )
}


def make_model(shape: Shape, device: str) -> Any:
    """Return a transformers model with random weights in bfloat16 on a device; it generates without an end token."""
    torch.manual_seed(0)
    with torch.device(device), hf_logging_off():
        model = AutoModelForCausalLM.from_config(shape.config(), dtype=torch.bfloat16)
    model.generation_config = GenerationConfig()
    return model.to(device).eval().requires_grad_(False)


def make_drafter(target: Any, shape: Shape, device: str) -> Any:
    """Return the drafter of a target; all its weights are copies of the target's."""
    drafter = make_model(shape.drafter, device)
    drafter.load_state_dict({key: value for key, value in target.state_dict().items() if key in drafter.state_dict()})
    return drafter


@torch.no_grad()
def fit_overlap(target: Any, drafter: Any, shape: Shape, goal: float = OVERLAP) -> tuple[float, float]:
    """Scale the target's layers that the drafter lacks; return the scale and the overlap at temperature 1.

    The scale is at most 1. Where the overlap exceeds the goal at scale 1, the scale ends near 1.
    """
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(2, shape.vocabulary, PROBES, generator=generator).to(target.device)
    draft = torch.softmax(drafter(ids).logits.float(), -1)
    low, high, now, found = 0.0, 1.0, 1.0, 1.0
    for _ in range(TRIES):
        before, now = now, (low + high) / 2
        for layer in target.model.layers[shape.draft_layers :]:
            layer.self_attn.o_proj.weight.mul_(now / before)
            layer.mlp.down_proj.weight.mul_(now / before)
        found = float(torch.minimum(torch.softmax(target(ids).logits.float(), -1), draft).sum(-1).mean())
        low, high = (now, high) if found > goal else (low, now)
    return now, found


def save(model: Any, folder: Path) -> Path:
    """Write a model and a tokenizer of as many words as the model has tokens."""
    words = {END if number == 1 else f"t{number}": number for number in range(model.config.vocab_size)}
    tokenizer = Tokenizer(WordLevel(words, unk_token="t0"))
    with hf_logging_off():
        model.save_pretrained(folder)
        PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="t0", eos_token=END).save_pretrained(folder)
    return folder
