from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer

from cospec.core.model_io import SequenceSlice, TokenBatch
from cospec.errors import InvalidInput, ModelError
from cospec.models.loading import LoadOptions, load_model
from cospec.training.corpus import Corpus
from cospec.training.evaluate import heldout_loss
from cospec.training.export import export
from cospec.training.family import load_adapter, load_trained, train_target, train_variants
from cospec.training.recipe import TrainingRecipe

NAME = "target-prose"


def test_a_variant_knows_its_domain_better(
    recipe: TrainingRecipe, runs: Path, tokenizer: Tokenizer, corpus: Corpus
) -> None:
    train_target(recipe, runs, runs)
    before = load_trained(recipe, "target", tokenizer, runs)
    assert list(train_variants(recipe, runs, runs)) == [NAME]
    after = load_trained(recipe, NAME, tokenizer, runs)
    again = load_trained(recipe, "target", tokenizer, runs)
    assert all(torch.equal(tensor, again.state_dict()[name]) for name, tensor in before.state_dict().items())
    was, now = (heldout_loss(model, tokenizer, corpus.heldout["prose"], 32).nats_per_token for model in (before, after))
    assert now < was - 0.1


def test_attached_factors_compute_what_merged_ones_do(recipe: TrainingRecipe, runs: Path, tokenizer: Tokenizer) -> None:
    train_target(recipe, runs, runs)
    train_variants(recipe, runs, runs)
    attached = load_trained(recipe, "target", tokenizer, runs)
    ids = torch.tensor([[5, 9, 40, 7, 3]])
    plain = attached(ids).logits
    load_adapter(recipe, NAME, attached, runs).attach(attached)
    merged = load_trained(recipe, NAME, tokenizer, runs)(ids).logits
    assert torch.allclose(attached(ids).logits, merged, atol=1e-4)
    assert not torch.allclose(plain, merged, atol=1e-2)


def test_an_interrupted_variant_ends_as_an_unbroken_one(recipe: TrainingRecipe, runs: Path) -> None:
    train_target(recipe, runs, runs)
    flat = recipe.variants[NAME].schedule.model_copy(update={"warmup": 0.0, "decay": 0.0})
    half, whole = (
        recipe.model_copy(
            update={
                "variants": {
                    NAME: recipe.variants[NAME].model_copy(
                        update={"schedule": flat.model_copy(update={"tokens": tokens})}
                    )
                }
            }
        )
        for tokens in (1_000, 2_000)
    )
    unbroken = train_variants(whole, runs, runs)[NAME]
    for path in (runs / NAME).iterdir():
        path.unlink()
    train_variants(half, runs, runs)
    broken = train_variants(whole, runs, runs)[NAME]
    assert broken.step == unbroken.step == 8
    for name, tensor in unbroken.model.state_dict().items():
        assert torch.equal(tensor, broken.model.state_dict()[name]), name


def test_an_exported_variant_is_an_adapter_on_the_target(
    recipe: TrainingRecipe, runs: Path, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    train_target(recipe, runs, runs)
    train_variants(recipe, runs, runs)
    folder = export(recipe, runs, tmp_path / "zoo")
    given = json.loads((folder / NAME / "adapter_config.json").read_text())
    assert given["base_model_name_or_path"] == "../target" and given["r"] == 4
    tensors = load_file(folder / NAME / "adapter_model.safetensors")
    assert len(tensors) == 2 * 7 * recipe.target.num_hidden_layers
    prompt = tuple(range(5, 15))
    loaded = load_model(str(folder / NAME), LoadOptions(device="cpu", dtype="float32"))
    assert loaded.pages.allocate("a", len(prompt))
    logits = loaded.forward(TokenBatch((SequenceSlice("a", 0, prompt),)))
    expected = load_trained(recipe, NAME, tokenizer, runs)(torch.tensor([prompt])).logits[0]
    target = load_trained(recipe, "target", tokenizer, runs)(torch.tensor([prompt])).logits[0]
    assert (logits - expected).abs().max() < 0.3 * (expected - target).abs().max()


def test_what_is_no_variant_is_named(recipe: TrainingRecipe, runs: Path, tokenizer: Tokenizer) -> None:
    with pytest.raises(InvalidInput, match="name is 'other'"):
        train_variants(recipe, runs, runs, ["other"])
    train_target(recipe, runs, runs)
    with pytest.raises(ModelError, match=r"holds no target-prose; .*cospec train variants"):
        load_trained(recipe, NAME, tokenizer, runs)
