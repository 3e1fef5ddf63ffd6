from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer
from typer.testing import CliRunner

from cospec.cli.main import app
from cospec.errors import ModelError
from cospec.training import export as exporting
from cospec.training.distill import train_specialists
from cospec.training.export import export, measure
from cospec.training.family import adopt, load_tokenizer, load_trained
from cospec.training.recipe import TrainingRecipe


def test_export_writes_what_transformers_loads(recipe: TrainingRecipe, trained_runs: Path, tmp_path: Path) -> None:
    folder = export(recipe, trained_runs, tmp_path / "zoo")
    weights = load_file(folder / "target" / "model.safetensors")
    assert {tensor.dtype for tensor in weights.values()} == {torch.bfloat16}
    assert "lm_head.weight" not in weights
    model = AutoModelForCausalLM.from_pretrained(folder / "target", dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder / "target")
    trained = load_trained(recipe, "target", load_tokenizer(trained_runs / "tokenizer"), trained_runs)
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


def test_measure_fills_the_card(
    recipe: TrainingRecipe, trained_runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(exporting, "SAMPLES", {"math": "Question: What"})
    train_specialists(recipe, trained_runs, trained_runs, ["code"])
    folder = export(recipe, trained_runs, tmp_path / "zoo")
    card = measure(recipe, trained_runs, folder)
    assert json.loads((folder / "card.json").read_text()) == json.loads(json.dumps(card))
    assert list(card["members"]) == ["target", "drafter", "code", "target-prose"]
    domains = {"prose", "math", "code"}
    assert all(set(member["losses"]) == domains for member in card["members"].values())
    for temperature in ("0", "1"):
        assert set(card["acceptance"][temperature]) == {"drafter", "code"}
        for figures in (
            card["acceptance"][temperature][name][domain] for name in ("drafter", "code") for domain in domains
        ):
            rate, length = figures["draft_acceptance_rate"], figures["acceptance_length"]
            assert 0 <= rate <= 1 and figures["tokens"] > 0
            # Drafts of four; the last of an output may be shorter.
            assert 1 + 3 * rate < length <= 1 + 4 * rate + 1e-3
        for figures in card["agreement"][temperature]["target-prose"].values():
            assert 0.2 < figures["overlap"] < 0.9999 and 0 <= figures["top1"] <= 1
    page = (folder / "README.md").read_text()
    for part in ("## Loss", "## Acceptance", "## Agreement", "Question: What", "low-rank adapters"):
        assert part in page


def test_what_was_adopted_keeps_its_weights_and_figures(
    recipe: TrainingRecipe, trained_runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(exporting, "SAMPLES", {"math": "Question: What"})
    shutil.rmtree(trained_runs / "target-prose")
    family = export(recipe, trained_runs, tmp_path / "family")
    before = measure(recipe, trained_runs, family)
    before["notes"] = ["The target was trained in two parts."]
    (family / "card.json").write_text(json.dumps(before))
    later = tmp_path / "later"
    adopt(family, later)
    (later / "tokens").symlink_to(trained_runs / "tokens")
    train_specialists(recipe, trained_runs, later, ["code"])
    folder = export(recipe, later, family)
    card = measure(recipe, later, folder)
    for name in ("target", "drafter"):
        assert card["members"][name] == before["members"][name]
        written, adopted = (load_file(path / name / "model.safetensors") for path in (folder, later / "adopted"))
        assert all(torch.equal(tensor, adopted[key]) for key, tensor in written.items())
    assert card["notes"] == before["notes"] and card["samples"] == before["samples"]
    assert card["acceptance"]["0"]["drafter"] == before["acceptance"]["0"]["drafter"]
    assert card["members"]["code"]["tokens"] == 16 * 256 and set(card["acceptance"]["0"]) == {"drafter", "code"}


def test_a_family_that_is_too_large_is_refused(
    recipe: TrainingRecipe, trained_runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(exporting, "LIMIT", 1000)
    with pytest.raises(ModelError, match="MiB"):
        export(recipe, trained_runs, tmp_path / "zoo")


@pytest.mark.parametrize(
    ("command", "named"),
    [
        (["target", "--data", "nowhere"], "data is 'nowhere'"),
        (["drafter", "--recipe", "zou", "--data", "."], "recipe is 'zou'"),
        (["export", "--out", "nowhere"], "out is 'nowhere'"),
        (["evaluate", "--out", ".", "--to", "nowhere"], "cospec train export"),
        (["drafters", "--from", "nowhere"], "from is 'nowhere'"),
        (["drafters", "--data", ".", "--domain", "law"], "domain is 'law'"),
        (["variants", "--data", ".", "--name", "law"], "name is 'law'"),
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
    recipe: TrainingRecipe, runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(exporting, "SAMPLES", {})
    path = tmp_path / "tiny.yaml"
    path.write_text(json.dumps(recipe.model_dump(mode="json")))
    common = ["--recipe", str(path), "--out", str(runs)]
    runner = CliRunner()
    for command in (
        ["target", *common, "--data", str(runs), "--tokens", "512"],
        ["drafter", *common, "--data", str(runs), "--tokens", "512"],
        ["drafters", *common, "--data", str(runs), "--domain", "math"],
        ["variants", *common, "--data", str(runs)],
        ["export", *common, "--to", str(tmp_path / "zoo")],
        ["evaluate", *common, "--to", str(tmp_path / "zoo")],
    ):
        result = runner.invoke(app, ["train", *command])
        assert result.exit_code == 0, result.output
    assert "nats per token" in result.output
