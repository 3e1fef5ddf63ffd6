"""A target, and a drafter, that go on from an exported family's weights with a new schedule."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from cospec.cli.main import app
from cospec.errors import ModelError
from cospec.training import export as exporting
from cospec.training.distill import train_drafter
from cospec.training.export import export
from cospec.training.family import (
    adopt,
    continue_training,
    load_tokenizer,
    load_trained,
    origin,
    train_target,
)
from cospec.training.recipe import TrainingRecipe

FULL = 16 * 256  # tokens of a schedule, in whole batches


@pytest.fixture
def runs(trained_runs: Path) -> Path:
    """What the training left."""
    return trained_runs


@pytest.fixture
def family(recipe: TrainingRecipe, runs: Path, tmp_path: Path) -> Path:
    """Exported, with a variant, but without what its training left."""
    return export(recipe, runs, tmp_path / "family")


@pytest.fixture
def later(family: Path, runs: Path, tmp_path: Path) -> Path:
    out = tmp_path / "later"
    adopt(family, out)
    (out / "tokens").symlink_to(runs / "tokens")
    return out


def weights(recipe: TrainingRecipe, name: str, out: Path) -> Mapping[str, torch.Tensor]:
    model: Any = load_trained(recipe, name, load_tokenizer(out / "tokenizer"), out)
    found: Mapping[str, torch.Tensor] = model.state_dict()
    return found


def losses(folder: Path) -> list[float]:
    return [json.loads(line)["loss"] for line in (folder / "log.jsonl").read_text().splitlines()]


def test_a_target_goes_on_from_exported_weights(recipe: TrainingRecipe, runs: Path, later: Path) -> None:
    continue_training("target", later)
    assert origin("target", later) is not None and origin("drafter", later) is None
    trainer = train_target(recipe, runs, later)
    assert trainer.step == 16, "a whole schedule of its own"
    first, second = losses(runs / "target"), losses(later / "target")
    assert second[0] < first[0] - 1 and second[-1] < first[-1] - 0.1
    assert first[:3] != second[:3]


def test_it_sees_the_windows_after_those_already_seen(recipe: TrainingRecipe, runs: Path, later: Path) -> None:
    longer = recipe.model_copy(
        update={"target_schedule": recipe.target_schedule.model_copy(update={"tokens": 2 * FULL})}
    )
    continue_training("target", later)
    ahead, whole = train_target(recipe, runs, later), train_target(longer, runs, runs)
    assert (ahead.batches(0) == whole.batches(16)).all() and (ahead.batches(0) != whole.batches(0)).any()


def test_an_interrupted_one_ends_as_an_unbroken_one(
    recipe: TrainingRecipe, runs: Path, later: Path, tmp_path: Path
) -> None:
    flat = recipe.target_schedule.model_copy(update={"warmup": 0.0, "decay": 0.0})
    whole, half = (
        recipe.model_copy(update={"target_schedule": flat.model_copy(update={"tokens": tokens})})
        for tokens in (FULL, FULL // 2)
    )
    other = tmp_path / "other"
    adopt(later / "adopted", other)
    (other / "tokens").symlink_to(runs / "tokens")
    for out in (later, other):
        continue_training("target", out)
    unbroken = train_target(whole, runs, later)
    train_target(half, runs, other)
    continue_training("target", other)  # said again: it has begun, so nothing starts anew
    broken = train_target(whole, runs, other)
    for name, tensor in unbroken.model.state_dict().items():
        assert torch.equal(tensor, broken.model.state_dict()[name]), name


def test_the_card_tells_both_parts(recipe: TrainingRecipe, runs: Path, later: Path, tmp_path: Path) -> None:
    continue_training("target", later)
    train_target(recipe, runs, later)
    folder = export(recipe, later, tmp_path / "second")
    members = json.loads((folder / "card.json").read_text())["members"]
    assert (members["target"]["tokens"], members["target"]["steps"]) == (2 * FULL, 32)
    assert members["target"]["before"]["tokens"] == members["drafter"]["tokens"] == FULL
    assert "4,096 tokens" in (folder / "README.md").read_text()
    third = tmp_path / "third"
    adopt(folder, third)
    (third / "tokens").symlink_to(runs / "tokens")
    continue_training("target", third)
    train_target(recipe, runs, third)
    members = json.loads((export(recipe, third, tmp_path / "fourth") / "card.json").read_text())["members"]
    assert (members["target"]["tokens"], members["target"]["before"]["tokens"]) == (3 * FULL, 2 * FULL)


def test_adapters_for_the_old_target_are_removed(recipe: TrainingRecipe, runs: Path, family: Path, later: Path) -> None:
    export(recipe, later, family)
    assert (family / "target-prose" / "adapter_config.json").exists(), "as long as the target is the same"
    continue_training("target", later)
    train_target(recipe, runs, later)
    export(recipe, later, family)
    assert "target-prose" not in json.loads((family / "card.json").read_text())["members"]
    assert not (family / "target-prose").exists() and (family / "drafter").exists()


def test_a_drafter_goes_on_too(recipe: TrainingRecipe, runs: Path, later: Path) -> None:
    continue_training("drafter", later)
    before = weights(recipe, "drafter", later)
    one = recipe.model_copy(update={"drafter_schedule": recipe.drafter_schedule.model_copy(update={"tokens": 256})})
    trainer = train_drafter(one, runs, later)
    for name, tensor in trainer.model.state_dict().items():
        assert float((tensor - before[name]).abs().max()) < 0.05, f"{name} is one step away"


def test_what_cannot_be_gone_on_from_is_named(recipe: TrainingRecipe, runs: Path, later: Path, family: Path) -> None:
    with pytest.raises(ModelError, match="holds no code to continue"):
        continue_training("code", later)
    (later / "tokenizer" / "tokenizer.json").write_text("{}")
    with pytest.raises(ModelError, match="has another tokenizer"):
        adopt(family, later)
    wider = recipe.model_copy(update={"target": recipe.target.model_copy(update={"hidden_size": 48})})
    adopt(family, runs / "new")
    (runs / "new" / "tokens").symlink_to(runs / "tokens")
    continue_training("target", runs / "new")
    with pytest.raises(ModelError, match="another shape"):
        train_target(wider, runs, runs / "new")


def test_all_stages_go_on_by_one_command(
    recipe: TrainingRecipe, family: Path, runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(exporting, "SAMPLES", {})
    small = recipe.model_dump(mode="json") | {"specialists": None}
    for part in (small, small["variants"]["target-prose"]):
        for key in ("target_schedule", "drafter_schedule", "schedule"):
            if key in part:
                part[key]["tokens"] = 512
    path, out = tmp_path / "tiny.yaml", tmp_path / "later"
    path.write_text(json.dumps(small))
    out.mkdir()
    (out / "tokens").symlink_to(runs / "tokens")
    common = ["--recipe", str(path), "--data", str(runs), "--out", str(out), "--to", str(tmp_path / "new")]
    result = CliRunner().invoke(app, ["train", "all", "--from", str(family), *common])
    assert result.exit_code == 0, result.output
    members = json.loads((tmp_path / "new" / "card.json").read_text())["members"]
    assert {name: member.get("before", {}).get("tokens") for name, member in members.items()} == {
        "target": FULL,
        "drafter": FULL,
        "target-prose": None,
    }
