from __future__ import annotations

import json
from pathlib import Path
from typing import IO

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer

from cospec.errors import ModelError
from cospec.training import trainer as training_loop
from cospec.training.corpus import Corpus
from cospec.training.family import load_trained, new_model, train_target
from cospec.training.recipe import TrainingRecipe, TrainingSchedule
from cospec.training.trainer import Trainer, mixed_precision, next_token_loss


def _trainer(recipe: TrainingRecipe, tokenizer: Tokenizer, corpus: Corpus, folder: Path) -> Trainer:
    schedule = recipe.target_schedule

    def batches(step: int) -> np.ndarray:
        return corpus.windows(recipe.mixture, schedule.rows, schedule.sequence, (recipe.seed, 0, step))

    model = new_model(recipe.target, recipe, tokenizer, recipe.seed)
    return Trainer(model, schedule, next_token_loss, batches, folder)


def _losses(folder: Path) -> list[float]:
    return [json.loads(line)["loss"] for line in (folder / "log.jsonl").read_text().splitlines()]


class _Stop(Exception):
    """An interruption."""


def _interrupt(trainer: Trainer, at: int) -> None:
    """Run until step ``at`` and drop everything after its last checkpoint, as a killed process would."""
    plain = trainer.batches

    def batches(step: int) -> np.ndarray:
        if step == at:
            raise _Stop
        return plain(step)

    trainer.batches = batches
    with pytest.raises(_Stop):
        trainer.run(save_every=0.0)


def test_the_loss_falls(recipe: TrainingRecipe, runs: Path) -> None:
    trainer = train_target(recipe, runs, runs)
    losses = _losses(runs / "target")
    assert trainer.step == len(losses) == 16
    assert losses[0] == pytest.approx(np.log(recipe.vocab_size), abs=0.5)
    assert losses[-1] < losses[0] - 1


def test_an_interrupted_run_ends_as_an_unbroken_one(
    recipe: TrainingRecipe, tokenizer: Tokenizer, corpus: Corpus, tmp_path: Path
) -> None:
    whole = _trainer(recipe, tokenizer, corpus, tmp_path / "whole")
    whole.run()
    _interrupt(_trainer(recipe, tokenizer, corpus, tmp_path / "broken"), at=7)
    resumed = _trainer(recipe, tokenizer, corpus, tmp_path / "broken")
    assert resumed.step == 7
    resumed.run()
    for name, weights in whole.model.state_dict().items():
        assert torch.equal(weights, resumed.model.state_dict()[name]), name
    assert _losses(tmp_path / "whole") == _losses(tmp_path / "broken")


def test_steps_after_the_last_checkpoint_leave_the_log(
    recipe: TrainingRecipe, tokenizer: Tokenizer, corpus: Corpus, tmp_path: Path
) -> None:
    _interrupt(_trainer(recipe, tokenizer, corpus, tmp_path), at=5)
    with (tmp_path / "log.jsonl").open("a") as log:
        log.write('{"step": 6, "loss": 1.0, "s": 0.0}\n{"step": 7, "lo')
    _trainer(recipe, tokenizer, corpus, tmp_path).run()
    steps = [json.loads(line)["step"] for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    assert steps == list(range(1, 17))


def test_a_torn_write_leaves_the_old_checkpoint(
    recipe: TrainingRecipe, tokenizer: Tokenizer, corpus: Corpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = _trainer(recipe, tokenizer, corpus, tmp_path)
    _interrupt(trainer, at=3)
    before = (tmp_path / "checkpoint.pt").read_bytes()

    def torn(state: object, file: IO[bytes]) -> None:
        file.write(b"half a file")
        raise OSError("no space left on device")

    monkeypatch.setattr(torch, "save", torn)
    trainer.step = 4
    with pytest.raises(OSError, match="no space"):
        trainer.save()
    assert (tmp_path / "checkpoint.pt").read_bytes() == before
    assert _trainer(recipe, tokenizer, corpus, tmp_path).step == 3


def test_a_loss_that_is_no_number_ends_the_run(
    recipe: TrainingRecipe, tokenizer: Tokenizer, corpus: Corpus, tmp_path: Path
) -> None:
    trainer = _trainer(recipe, tokenizer, corpus, tmp_path)
    plain = trainer.loss
    trainer.loss = lambda model, rows: plain(model, rows) * (float("nan") if trainer.step == 3 else 1.0)
    with pytest.raises(ModelError, match="is nan at step 4"):
        trainer.run(save_every=0.0)
    again = _trainer(recipe, tokenizer, corpus, tmp_path)
    assert again.step == 3 and all(p.isfinite().all() for p in again.model.parameters())


def test_a_resumed_run_may_end_elsewhere(recipe: TrainingRecipe, runs: Path) -> None:
    def until(tokens: int) -> TrainingRecipe:
        schedule: TrainingSchedule = recipe.target_schedule.model_copy(update={"tokens": tokens})
        return recipe.model_copy(update={"target_schedule": schedule})

    assert train_target(until(1_024), runs, runs).step == 4
    assert train_target(until(2_048), runs, runs).step == 8
    assert train_target(until(1_024), runs, runs).step == 8


def test_a_checkpoint_of_another_shape_is_refused(recipe: TrainingRecipe, runs: Path, tokenizer: Tokenizer) -> None:
    short = recipe.model_copy(update={"target_schedule": recipe.target_schedule.model_copy(update={"tokens": 256})})
    train_target(short, runs, runs)
    wider = short.model_copy(update={"target": short.target.model_copy(update={"hidden_size": 48})})
    with pytest.raises(ModelError, match="another shape"):
        train_target(wider, runs, runs)
    with pytest.raises(ModelError, match="another shape"):
        load_trained(wider, "target", tokenizer, runs)
    with pytest.raises(ModelError, match="cospec train drafter"):
        load_trained(recipe, "drafter", tokenizer, runs)


@pytest.mark.parametrize(("offered", "bf16"), [(("base", "avx2", "avx512"), False), (("avx512_bf16",), True)])
def test_a_processor_without_bf16_products_trains_in_float32(
    offered: tuple[str, ...], bf16: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(training_loop, "available", lambda: True)
    monkeypatch.setattr(training_loop, "offered", lambda: offered)
    with mixed_precision(torch.device("cpu")):
        product = torch.ones(2, 2) @ torch.ones(2, 2)
    assert (product.dtype == torch.bfloat16) == bf16
