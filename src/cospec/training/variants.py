"""Variants of the target: low-rank adapters trained on other mixtures of domains.

Collaborative decoding (CoS) combines models of comparable size with different knowledge, such as these variants.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path

import numpy as np
from torch import Tensor, nn

from cospec.errors import InvalidInput
from cospec.training.corpus import Corpus
from cospec.training.family import load_trained, prepare
from cospec.training.low_rank import Adapter
from cospec.training.recipe import TrainingRecipe, VariantConfig
from cospec.training.trainer import Trainer, next_token_loss


def train_variants(recipe: TrainingRecipe, data: Path, out: Path, names: Sequence[str] = ()) -> dict[str, Trainer]:
    """Train the recipe's variants of the target in ``out``. Resumes from checkpoints in ``out``.

    Args:
        names: of the variants; empty means all.

    Raises:
        InvalidInput: a name is not one of the recipe's variants.
    """
    for name in names:
        if name not in recipe.variants:
            allowed = ", ".join(recipe.variants) or "none, because the recipe has no variants"
            raise InvalidInput("name", name, f"one of {allowed}" if recipe.variants else allowed)
    tokenizer, corpus = prepare(recipe, data, out)
    trainers = {}
    for name in names or recipe.variants:
        variant = recipe.variants[name]
        base = load_trained(recipe, "target", tokenizer, out)
        adapter = Adapter(base, variant, recipe.seed)
        adapter.attach(base)

        def loss(_adapter: nn.Module, rows: Tensor, base: nn.Module = base) -> Tensor:
            return next_token_loss(base, rows)

        batches = partial(_batch, corpus, variant, recipe.seed)
        trainers[name] = Trainer(adapter, variant.schedule, loss, batches, out / name)
        trainers[name].run()
    return trainers


def _batch(corpus: Corpus, variant: VariantConfig, seed: int, step: int) -> np.ndarray:
    # The third number separates these windows from the windows of the target's training.
    schedule = variant.schedule
    return corpus.windows(variant.mixture, schedule.rows, schedule.sequence, (seed, 4, step))
