"""Tiny random Llamas on disk, their engines, and their distributions by transformers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers

from cospec.assembly.build import assemble
from cospec.assembly.components import TextInfo
from cospec.config import EngineConfig, SpeculativeConfig
from cospec.core.engine import Engine
from cospec.core.interfaces import Model
from cospec.core.plugin_base import Drafter
from cospec.core.types import Request
from cospec.models.loading import LoadOptions, load_model
from cospec.models.weight_cache import WeightCache
from cospec.sampling_params import SamplingParams
from cospec.text.input_processor import make_requests
from harness.ensembles import Mix, weighted
from harness.enumerated_draws import OutputDistribution
from harness.reference import normalised, truncated
from harness.toys import run_all, tokens_of

VOCAB = 64
PAGE = 8
GREEDY = SamplingParams(temperature=0, max_tokens=16)
SEEDED = SamplingParams(temperature=0.8, max_tokens=16, seed=3, n=2)
BYTES_PER_TOKEN = 3 * 2 * 2 * 8 * 4  # layers, keys and values, heads, head size, float32


def write_pair(target: Path, drafter: Path, *, layers: int = 3, hidden: int = 32, intermediate: int = 48) -> None:
    """A target, and a drafter that is the target with a little noise on its weights."""
    config = transformers.LlamaConfig(
        vocab_size=VOCAB, hidden_size=hidden, intermediate_size=intermediate, num_hidden_layers=layers,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=128, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    generator = torch.Generator().manual_seed(1)
    model = transformers.LlamaForCausalLM(config).float().eval()
    for parameter in model.parameters():
        if parameter.dim() >= 2:
            parameter.data = torch.randn(parameter.shape, generator=generator) * 0.25
    model.save_pretrained(target)
    for parameter in model.parameters():
        parameter.data += torch.randn(parameter.shape, generator=generator) * 0.02
    model.save_pretrained(drafter)


def write_tokenizer(folder: Path) -> None:
    """Words t0 to t63; any other is t0."""
    words = Tokenizer(models.WordLevel({f"t{n}": n for n in range(VOCAB)}, unk_token="t0"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    transformers.PreTrainedTokenizerFast(tokenizer_object=words).save_pretrained(folder)


def load(folder: Path, fused: Any = "auto", pages: int = 200) -> Model:
    """The model with a cache of so many pages; ``fused`` as in ``LoadOptions``. The first load packs the weights."""
    options = LoadOptions(
        device="cpu",
        dtype="float32",
        page_size=PAGE,
        cache_bytes=pages * PAGE * BYTES_PER_TOKEN,
        fused=fused,
        weight_cache=WeightCache(1 << 30),
    )
    return load_model(str(folder), options)


def llama_engine(
    target: Model, drafter: Drafter | None, k: Any = 3, acceptance_method: str = "auto", **config: Any
) -> Engine:
    """An engine without text; ``max_nodes`` and ``widths`` among ``config`` are those of ``SpeculativeConfig``."""
    shape = {key: config.pop(key) for key in ("max_nodes", "widths") if key in config}
    speculative = SpeculativeConfig(num_speculative_tokens=k, acceptance_method=acceptance_method, **shape)
    return Engine(assemble(target, drafter, speculative, EngineConfig(**config), TextInfo()))


def mixed_requests(count: int = 5) -> list[Request]:
    """Greedy and seeded requests; prompts of several lengths begin alike."""
    prompts = [[(7 * n + i * i * 3) % VOCAB if i > 6 else i for i in range(3 + 4 * n)] for n in range(count)]
    return [
        each
        for name, params in (("g", GREEDY), ("s", SEEDED))
        for n, prompt in enumerate(prompts)
        for each in make_requests(f"{name}{n}", prompt, params)
    ]


def alone(target: Model) -> dict[str, tuple[int, ...]]:
    """The outputs of each of ``mixed_requests`` without neighbours and without drafts."""
    found: dict[str, tuple[int, ...]] = {}
    for request in mixed_requests():
        found |= tokens_of(run_all(llama_engine(target, None), [request]))
    return found


def seeded(prompt: Sequence[int], params: SamplingParams, count: int) -> list[Request]:
    """The same request with seeds from 0 on."""
    requests = (make_requests(f"r{seed}", prompt, params)[0] for seed in range(count))
    return [replace(request, seed=seed) for seed, request in enumerate(requests)]


def distribution_of(folder: Path, params: SamplingParams, prompt: Sequence[int], length: int) -> OutputDistribution:
    """The joint distribution of ``length`` tokens, by plain forward passes over every prefix."""
    return blended_distribution_of([folder], weighted(1.0), params, prompt, length)


@torch.no_grad()
def blended_distribution_of(
    folders: Sequence[Path], mix: Mix, params: SamplingParams, prompt: Sequence[int], length: int
) -> OutputDistribution:
    """The same of several models under a blend by the book."""
    models = [plain_model(folder) for folder in folders]
    distribution: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(length):
        prefixes = list(distribution)
        texts = torch.tensor([[*prompt, *prefix] for prefix in prefixes]).split(64)
        rows = [torch.cat([_last_probabilities(model, part) for part in texts]).tolist() for model in models]
        distribution = {
            (*prefix, token): distribution[prefix] * p
            for prefix, *own in zip(prefixes, *rows, strict=True)
            for token, p in enumerate(truncated(_tempered(mix(own), params.temperature), params))
            if p > 0
        }
    return dict(distribution.items())


@torch.no_grad()
def blended_greedy_choices(
    folders: Sequence[Path], mix: Mix, prompt: Sequence[int], tokens: Sequence[int]
) -> tuple[int, ...]:
    """The likeliest token in the place of each of ``tokens``, of several models under a blend by the book.

    An output that equals its choices is the greedy output.
    """
    text, first = torch.tensor([[*prompt, *tokens[:-1]]]), len(prompt) - 1
    logits = [plain_model(folder)(input_ids=text, use_cache=False).logits[0, first:] for folder in folders]
    places = zip(*(torch.softmax(rows.double(), -1).tolist() for rows in logits), strict=True)
    return tuple(mixed.index(max(mixed)) for mixed in (mix(list(own)) for own in places))


def plain_model(folder: Path) -> Any:
    """The model in transformers' own code."""
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def _last_probabilities(model: Any, texts: torch.Tensor) -> torch.Tensor:
    """``[texts, V]`` after texts of one length."""
    return torch.softmax(model(input_ids=texts, use_cache=False).logits[:, -1].double(), -1)


def _tempered(p: Sequence[float], temperature: float) -> list[float]:
    top = max(p)
    return normalised([(value / top) ** (1 / temperature) for value in p])
