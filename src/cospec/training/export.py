"""From checkpoints to the folder that ships: bf16 weights, tokenizer, model card."""

from __future__ import annotations

import json
import shutil
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from transformers import GenerationConfig, LlamaForCausalLM

from cospec.errors import ModelError
from cospec.training.card import render
from cospec.training.corpus import Corpus, end_token
from cospec.training.evaluate import Agreement, TextLoss, agreement, heldout_answers, heldout_losses
from cospec.training.family import load_tokenizer, load_trained
from cospec.training.generate import engine_writer
from cospec.training.recipe import Recipe

LIMIT = 64 * 2**20  # bytes: a family is small enough to come with the package
MEMBERS = ("target", "drafter")
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
SAMPLES = {
    "prose": "It was a cold morning when the old man came to the door and",
    "math": "Question: Tom has 3 boxes with 12 pencils in each. He gives away 6 pencils. How many are left?\nAnswer:",
    "code": "def read_lines(path):\n",
}


def export(recipe: Recipe, runs: Path, folder: Path) -> Path:
    """Write every trained member of ``runs`` to ``folder/<member>`` and the card to ``folder``.

    Raises:
        ModelError: nothing is trained yet, or the family would be larger than 64 MiB.
    """
    tokenizer = load_tokenizer(runs / "tokenizer")
    card: dict[str, Any] = {"recipe": recipe.model_dump(mode="json"), "members": {}}
    for name in MEMBERS:
        if name != "target" and not (runs / name / "checkpoint.pt").exists():
            continue
        model = load_trained(recipe, name, tokenizer, runs)
        save_model(model, folder / name, runs / "tokenizer", end_token(tokenizer))
        card["members"][name] = {"parameters": count(model), **_training(recipe, runs, name)}
    _write_card(folder, card)
    size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    if size > LIMIT:
        raise ModelError(f"{folder} takes {size / 2**20:.1f} MiB; allowed is at most {LIMIT // 2**20} MiB.")
    return folder


def save_model(model: LlamaForCausalLM, folder: Path, tokenizer: Path, end: int) -> None:
    """One Hugging Face model folder with bf16 weights; ``tokenizer`` is the folder whose files it gets."""
    torch.nn.Module.to(model, torch.bfloat16)
    model.generation_config = GenerationConfig(eos_token_id=end, pad_token_id=end)
    model.save_pretrained(folder)
    for name in TOKENIZER_FILES:
        if (tokenizer / name).exists():
            shutil.copyfile(tokenizer / name, folder / name)


def count(model: torch.nn.Module) -> int:
    """Parameters, shared ones once."""
    return sum(parameter.numel() for parameter in model.parameters())


def _training(recipe: Recipe, runs: Path, name: str) -> dict[str, Any]:
    state = torch.load(runs / name / "checkpoint.pt", map_location="cpu", weights_only=True)
    schedule = recipe.target_schedule if name == "target" else recipe.drafter_schedule
    return {"tokens": state["step"] * schedule.batch_tokens, "steps": state["step"], "hours": state["seconds"] / 3600}


def measure(recipe: Recipe, runs: Path, folder: Path) -> dict[str, Any]:
    """Measure the members in ``runs`` on held-out text and fill the card in ``folder``, which ``export`` wrote.

    Returns:
        The card's new content.
    """
    path = folder / "card.json"
    if not path.exists():
        raise ModelError(f"{folder} holds no card.json; allowed is a folder that `cospec train export` wrote.")
    card: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    tokenizer = load_tokenizer(runs / "tokenizer")
    corpus = Corpus.load(runs / "tokens")
    models = {name: load_trained(recipe, name, tokenizer, runs) for name in card["members"]}
    for name, model in models.items():
        losses = heldout_losses(model, tokenizer, corpus, recipe.context)
        card["members"][name]["losses"] = {domain: _rounded(loss) for domain, loss in losses.items()}
    writer = engine_writer(folder / "target")
    if "drafter" in models:
        card["acceptance"] = {
            f"{temperature:g}": {
                domain: _rounded(agreement(models["drafter"], models["target"], documents))
                for domain, documents in heldout_answers(writer, corpus, tokenizer, temperature).items()
            }
            for temperature in (0.0, 1.0)
        }
    card["samples"] = {
        domain: text + tokenizer.decode(writer([tokenizer.encode(text).ids], 96, 0.7, 1)[0])
        for domain, text in SAMPLES.items()
    }
    _write_card(folder, card)
    return card


def _rounded(figures: TextLoss | Agreement) -> dict[str, float]:
    return {name: round(value, 4) for name, value in asdict(figures).items()}


def _write_card(folder: Path, card: dict[str, Any]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "card.json").write_text(json.dumps(card, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    (folder / "README.md").write_text(render(card), encoding="utf-8")
