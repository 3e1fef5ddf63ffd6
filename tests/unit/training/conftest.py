"""A family that trains in seconds: three domains of a few thousand characters, a model of a few thousand weights."""

from __future__ import annotations

import shutil
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer

from cospec.training import eval_acceptance, export
from cospec.training.corpus import DOMAINS, Corpus, encode, split
from cospec.training.distill import train_drafter
from cospec.training.evaluate import heldout_answers
from cospec.training.family import train_target, train_tokenizer, train_variants
from cospec.training.recipe import (
    Distillation,
    ModelShape,
    Specialists,
    TrainingRecipe,
    TrainingSchedule,
    VariantConfig,
)

TEXTS = {
    "prose": [
        f"The {a} fox went over the {b} hill.\n\nIt was {a}, and the night was {b}." for a in "abcde" for b in "xyz"
    ],
    "math": [f"Question: What is {a} + {b}?\nAnswer: It is {a + b}." for a in range(8) for b in range(8)],
    "code": [f"def f{n}(x):\n    return x + {n}\n\n\ndef g{n}(x):\n    return x * {n}\n" for n in range(40)],
}


@pytest.fixture(autouse=True)
def one_thread() -> None:
    """Tests run in parallel; sums are equal only on the same number of threads."""
    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def few_short_outputs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Families are measured on fewer tokens."""
    monkeypatch.setattr(eval_acceptance, "LENGTH", 48)
    monkeypatch.setattr(export, "heldout_answers", partial(heldout_answers, rows=6))


@pytest.fixture(scope="session")
def recipe() -> TrainingRecipe:
    schedule = TrainingSchedule(tokens=4_000, batch_tokens=256, sequence=32, matrix_lr=0.02, other_lr=0.01)
    shape = ModelShape(
        hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2
    )
    return TrainingRecipe(
        name="tiny",
        seed=3,
        vocab_size=300,
        context=256,
        mixture={"prose": 0.4, "math": 0.3, "code": 0.3},
        target=shape,
        target_schedule=schedule,
        drafter=shape.model_copy(update={"hidden_size": 16, "num_hidden_layers": 1}),
        drafter_schedule=schedule,
        distillation=Distillation(corpus_tokens=1_000, written_tokens=300, temperatures=(0.0, 1.0)),
        specialists=Specialists(
            schedule=schedule, distillation=Distillation(corpus_tokens=600, written_tokens=300, written_share=0.5)
        ),
        variants={"target-prose": VariantConfig(mixture={"prose": 1.0}, rank=4, alpha=8, schedule=schedule)},
    )


@pytest.fixture(scope="session")
def tokenized(tmp_path_factory: pytest.TempPathFactory, recipe: TrainingRecipe) -> Path:
    """A folder as ``cospec train tokenizer`` leaves it; tests change copies."""
    folder = tmp_path_factory.mktemp("tokenized")
    tokenizer = train_tokenizer(
        (text for texts in TEXTS.values() for text in texts), recipe.vocab_size, recipe.context, folder / "tokenizer"
    )
    (folder / "tokens").mkdir()
    for domain in DOMAINS:
        for part, texts in zip(("train", "heldout"), split(TEXTS[domain], 0.2), strict=True):
            np.save(folder / "tokens" / f"{domain}.{part}.npy", encode(tokenizer, texts))
    return folder


@pytest.fixture(scope="session")
def trained(tmp_path_factory: pytest.TempPathFactory, tokenized: Path, recipe: TrainingRecipe) -> Path:
    """The same after the training of target, drafter and variant."""
    torch.set_num_threads(1)
    folder = Path(shutil.copytree(tokenized, tmp_path_factory.mktemp("trained") / "runs"))
    train_target(recipe, folder, folder)
    train_drafter(recipe, folder, folder)
    train_variants(recipe, folder, folder)
    return folder


@pytest.fixture
def runs(tokenized: Path, tmp_path: Path) -> Path:
    """A tokenizer and a tokenised corpus."""
    return Path(shutil.copytree(tokenized, tmp_path / "runs"))


@pytest.fixture
def trained_runs(trained: Path, tmp_path: Path) -> Path:
    """The same with target, drafter and variant."""
    return Path(shutil.copytree(trained, tmp_path / "runs"))


@pytest.fixture
def tokenizer(runs: Path) -> Tokenizer:
    return Tokenizer.from_file(str(runs / "tokenizer" / "tokenizer.json"))


@pytest.fixture
def corpus(runs: Path) -> Corpus:
    return Corpus.load(runs / "tokens")
