"""Training heads on a frozen target, from the lessons of its specialists."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer

from cospec.errors import InvalidInput
from cospec.models.medusa_heads import MedusaHeads, MedusaModule
from cospec.training.distill_data import DistillData, DistillOptions
from cospec.training.family import load_trained, prepare, train_target
from cospec.training.medusa_heads import RANKS, MedusaLoss, train_heads
from cospec.training.recipe import HeadsPlan, TrainingRecipe


@pytest.fixture
def with_heads(recipe: TrainingRecipe) -> TrainingRecipe:
    schedule = recipe.target_schedule.model_copy(update={"tokens": 8_000})
    return recipe.model_copy(update={"target_schedule": schedule, "heads": HeadsPlan(count=2, schedule=schedule)})


def test_heads_learn_what_the_target_says_later(
    with_heads: TrainingRecipe, runs: Path, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    train_target(with_heads, runs, runs)
    heads = train_heads(with_heads, runs, runs, tmp_path)
    assert heads.weight.shape == (2, 32, 32)
    assert MedusaHeads.load(tmp_path / "heads").accuracy == heads.accuracy
    for ranks in heads.accuracy:
        assert len(ranks) == RANKS and all(0 <= share <= 1 for share in ranks) and sum(ranks) <= 1.0001
    target = load_trained(with_heads, "target", tokenizer, runs)
    distill_data = DistillData.open(target, tokenizer, prepare(with_heads, runs, runs)[1], runs)
    assert with_heads.specialists is not None
    distill_options = DistillOptions({"math": 1.0}, with_heads.specialists.distillation, 32, with_heads.seed)
    distill_batches = distill_data.make(target, distill_options, "math")
    loss = MedusaLoss([distill_batches], target.lm_head.weight.detach(), 2)
    numbers = torch.tensor([[0, n] for n in range(8)])
    trained, untrained = MedusaModule(2, 32), MedusaModule(2, 32)
    for head, block in enumerate(trained.blocks):
        block.load_state_dict({"weight": heads.weight[head], "bias": heads.bias[head]})
    with torch.no_grad():
        assert loss(trained, numbers) < 0.9 * loss(untrained, numbers)


def test_interrupted_heads_end_as_unbroken_ones(with_heads: TrainingRecipe, runs: Path, tmp_path: Path) -> None:
    assert with_heads.heads is not None
    flat = with_heads.heads.schedule.model_copy(update={"warmup": 0.0, "decay": 0.0})
    whole, half = (
        with_heads.model_copy(update={"heads": HeadsPlan(count=2, schedule=flat.model_copy(update={"tokens": tokens}))})
        for tokens in (4_000, 2_000)
    )
    train_target(with_heads, runs, runs)
    unbroken = train_heads(whole, runs, runs, tmp_path / "unbroken")
    for path in (runs / "heads").iterdir():
        path.unlink()
    partly = train_heads(half, runs, runs, tmp_path / "half")
    broken = train_heads(whole, runs, runs, tmp_path / "broken")
    assert not torch.equal(partly.weight, unbroken.weight)
    assert torch.equal(broken.weight, unbroken.weight) and torch.equal(broken.bias, unbroken.bias)
    assert broken.accuracy == unbroken.accuracy


def test_a_recipe_without_heads_is_refused(recipe: TrainingRecipe, runs: Path, tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match=r"recipe\.heads is missing"):
        train_heads(recipe, runs, runs, tmp_path)
