from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer
from typer.testing import CliRunner

from cospec.cli.main import app
from cospec.errors import ModelError
from cospec.training import export as exporting
from cospec.training.distill import train_drafter
from cospec.training.export import export, measure
from cospec.training.family import load_tokenizer, load_trained, train_target
from cospec.training.recipe import Recipe


def test_export_writes_what_transformers_loads(recipe: Recipe, runs: Path, tmp_path: Path) -> None:
    train_target(recipe, runs, runs)
    folder = export(recipe, runs, tmp_path / "zoo")
    weights = load_file(folder / "target" / "model.safetensors")
    assert {tensor.dtype for tensor in weights.values()} == {torch.bfloat16}
    assert "lm_head.weight" not in weights
    model = AutoModelForCausalLM.from_pretrained(folder / "target", dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder / "target")
    trained = load_trained(recipe, "target", load_tokenizer(runs / "tokenizer"), runs)
    ids = torch.tensor([tokenizer("def f(x):\n    return 1")["input_ids"]])
    with torch.no_grad():
        assert torch.allclose(model(ids).logits, trained(ids).logits, atol=0.1)
    assert model.generation_config.eos_token_id == tokenizer.eos_token_id == 0
    chat = tokenizer.apply_chat_template(
        [{"role": "user", "content": "1 + 1?"}], add_generation_prompt=True, tokenize=False
    )
    assert chat == "Question: 1 + 1?\nAnswer:"
    card = json.loads((folder / "card.json").read_text())
    assert card["members"]["target"]["tokens"] == 16 * 256
    assert "| target |" in (folder / "README.md").read_text()


def test_measure_fills_the_card(recipe: Recipe, runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exporting, "SAMPLES", {"math": "Question: What"})
    train_target(recipe, runs, runs)
    train_drafter(recipe, runs, runs)
    folder = export(recipe, runs, tmp_path / "zoo")
    card = measure(recipe, runs, folder)
    assert json.loads((folder / "card.json").read_text()) == json.loads(json.dumps(card))
    assert set(card["members"]["drafter"]["losses"]) == {"prose", "math", "code"}
    for figures in card["acceptance"]["0"].values():
        assert 0 <= figures["top1"] <= 1 and 0 <= figures["overlap"] <= 1 and 1 <= figures["acceptance_length"] <= 5
    page = (folder / "README.md").read_text()
    assert "## Loss" in page and "## Acceptance" in page and "Question: What" in page


def test_a_family_that_is_too_large_is_refused(
    recipe: Recipe, runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train_target(recipe, runs, runs)
    monkeypatch.setattr(exporting, "LIMIT", 1000)
    with pytest.raises(ModelError, match="MiB"):
        export(recipe, runs, tmp_path / "zoo")


@pytest.mark.parametrize(
    ("command", "named"),
    [
        (["target", "--data", "nowhere"], "data is 'nowhere'; allowed is an existing folder."),
        (["drafter", "--recipe", "zou", "--data", "."], "recipe is 'zou'; allowed is one of zoo"),
        (["export", "--out", "nowhere"], "out is 'nowhere'"),
        (["evaluate", "--out", ".", "--to", "nowhere"], "cospec train export"),
    ],
)
def test_bad_arguments_get_one_sentence(
    command: list[str], named: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(app, ["train", *command])
    assert result.exit_code == 1
    assert named in result.output and len(result.output.strip().splitlines()) == 1


def test_the_commands_run_one_after_another(
    recipe: Recipe, runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(exporting, "SAMPLES", {})
    path = tmp_path / "tiny.yaml"
    path.write_text(json.dumps(recipe.model_dump(mode="json")))
    common = ["--recipe", str(path), "--out", str(runs)]
    runner = CliRunner()
    for command in (
        ["target", *common, "--data", str(runs), "--tokens", "512"],
        ["drafter", *common, "--data", str(runs), "--tokens", "512"],
        ["export", *common, "--to", str(tmp_path / "zoo")],
        ["evaluate", *common, "--to", str(tmp_path / "zoo")],
    ):
        result = runner.invoke(app, ["train", *command])
        assert result.exit_code == 0, result.output
    assert "nats per token" in result.output
