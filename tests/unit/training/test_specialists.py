from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer

from cospec.errors import InvalidInput, ModelError
from cospec.training.distill import DistillationLoss, train_drafter, train_specialists
from cospec.training.export import export
from cospec.training.family import adopt, continue_training, load_trained, prepare, train_target
from cospec.training.recipe import TrainingRecipe


@pytest.fixture
def family(recipe: TrainingRecipe, runs: Path, tmp_path: Path) -> Path:
    """An exported target and drafter, as they ship."""
    longer = recipe.target_schedule.model_copy(update={"tokens": 8_000})
    recipe = recipe.model_copy(update={"target_schedule": longer})
    train_target(recipe, runs, runs)
    train_drafter(recipe, runs, runs)
    return export(recipe, runs, tmp_path / "family")


def test_a_specialist_goes_on_from_the_adopted_drafter(
    recipe: TrainingRecipe, family: Path, runs: Path, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    out = tmp_path / "later"
    adopt(family, out)
    (out / "tokens").symlink_to(runs / "tokens")
    assert prepare(recipe, runs, out)[0].to_str() == tokenizer.to_str()
    trainers = train_specialists(recipe, runs, out, ["math", "code"])
    assert list(trainers) == ["math", "code"] and not (out / "prose").exists()
    drafter = load_trained(recipe, "drafter", tokenizer, out)
    for name, trainer in trainers.items():
        assert isinstance(trainer.loss, DistillationLoss)
        numbers = torch.arange(len(trainer.loss.teacher_cache.tokens))
        other = trainers["code" if name == "math" else "math"].model
        with torch.no_grad():
            own = trainer.loss(trainer.model, numbers)
            assert own < 0.95 * trainer.loss(drafter, numbers)
            assert own < 0.9 * trainer.loss(other, numbers)


def test_a_specialist_of_a_family_goes_on_with_other_text(
    recipe: TrainingRecipe, family: Path, runs: Path, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    assert recipe.specialists is not None
    first = train_specialists(recipe, runs, runs, ["code"])["code"]
    out = tmp_path / "later"
    adopt(export(recipe, runs, tmp_path / "specialised"), out)
    (out / "tokens").symlink_to(runs / "tokens")
    continue_training("code", out)
    still = recipe.specialists.schedule.model_copy(update={"tokens": 256, "matrix_lr": 1e-9, "other_lr": 1e-9})
    changed = recipe.specialists.model_copy(update={"schedule": still})
    later = recipe.model_copy(update={"specialists": changed})
    second = train_specialists(later, runs, out, ["code"])["code"]
    assert isinstance(first.loss, DistillationLoss) and isinstance(second.loss, DistillationLoss)
    assert not np.array_equal(first.loss.teacher_cache.tokens, second.loss.teacher_cache.tokens)
    drafter, numbers = load_trained(recipe, "drafter", tokenizer, out), torch.arange(4)
    with torch.no_grad():
        own, before, generic = (second.loss(model, numbers) for model in (second.model, first.model, drafter))
    assert abs(own - before) < 0.05 * abs(generic - before)
    card = json.loads((export(later, out, tmp_path / "again") / "card.json").read_text())["members"]["code"]
    assert (card["steps"], card["before"]["steps"]) == (first.step + 1, first.step)


def test_an_interrupted_specialist_ends_as_an_unbroken_one(recipe: TrainingRecipe, family: Path, runs: Path) -> None:
    assert recipe.specialists is not None
    flat = recipe.specialists.schedule.model_copy(update={"warmup": 0.0, "decay": 0.0})
    whole, half = (
        recipe.model_copy(
            update={
                "specialists": recipe.specialists.model_copy(
                    update={"schedule": flat.model_copy(update={"tokens": tokens})}
                )
            }
        )
        for tokens in (4_000, 2_000)
    )
    unbroken = train_specialists(whole, runs, runs, ["code"])["code"]
    for path in (runs / "code").iterdir():
        path.unlink()
    train_specialists(half, runs, runs, ["code"])
    broken = train_specialists(whole, runs, runs, ["code"])["code"]
    assert broken.step == unbroken.step
    for name, tensor in unbroken.model.state_dict().items():
        assert torch.equal(tensor, broken.model.state_dict()[name]), name


def test_what_cannot_be_specialised_is_named(recipe: TrainingRecipe, runs: Path, tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="domain is 'law'"):
        train_specialists(recipe, runs, runs, ["law"])
    with pytest.raises(InvalidInput, match=r"recipe\.specialists is missing"):
        train_specialists(recipe.model_copy(update={"specialists": None}), runs, runs)
    with pytest.raises(ModelError, match="holds no target"):
        train_specialists(recipe, runs, runs)
    with pytest.raises(ModelError, match="holds no target"):
        adopt(tmp_path, runs)
