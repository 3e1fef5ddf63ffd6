"""Exports checkpoints into the folder of a family: bf16 weights, tokenizer, model card."""

from __future__ import annotations

import datetime
import json
import shutil
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from transformers import GenerationConfig, LlamaForCausalLM

from cospec.errors import ModelError
from cospec.profiling.store import machine
from cospec.training.corpus import Corpus, end_token
from cospec.training.eval_acceptance import acceptances
from cospec.training.evaluate import (
    Agreement,
    Documents,
    TextLoss,
    agreements,
    heldout_answers,
    heldout_losses,
)
from cospec.training.family import (
    ADOPTED,
    TOKENIZER_FILES,
    load_adapter,
    load_tokenizer,
    load_trained,
    origin,
)
from cospec.training.generate import engine_writer
from cospec.training.model_card import render
from cospec.training.recipe import TrainingRecipe

TEMPERATURES = (0.0, 1.0)  # temperatures of the card
SAMPLED_AT = 0.5  # temperature of the samples
LIMIT = 64 * 2**20  # bytes: a family must be small enough for the package
SAMPLES = {
    "prose": "It was a cold morning when the old man came to the door and",
    "math": "Question: Tom has 3 boxes with 12 pencils in each. He gives away 6 pencils. How many are left?\nAnswer:",
    "code": "def read_lines(path):\n",
}


def export(recipe: TrainingRecipe, runs: Path, folder: Path) -> Path:
    """Write every member of ``runs`` to ``folder/<member>``, and the card to ``folder``.

    An adopted member without new training is copied unchanged, with its entry of the card. Heads and variants are
    copied only if their target is unchanged.

    Raises:
        ModelError: the target is missing, or the family exceeds 64 MiB.
    """
    tokenizer = load_tokenizer(runs / "tokenizer")
    adopted = _adopted_card(runs)
    card: dict[str, Any] = {"recipe": recipe.model_dump(mode="json"), "members": {}}
    same_target = not (runs / "target" / "checkpoint.pt").exists()
    for name in recipe.members:
        if (runs / name / "checkpoint.pt").exists():
            card["members"][name] = _write_trained(recipe, name, tokenizer, runs, folder)
        elif name in adopted.get("members", {}) and (same_target or name not in recipe.variants):
            _carry_over(name, True, runs, folder)
            card["members"][name] = adopted["members"][name]
        elif name == "target":
            load_trained(recipe, name, tokenizer, runs)  # raises an error that names the missing member
    if same_target:
        card |= {key: adopted[key] for key in ("notes", "samples", "sampled_at", "heads") if key in adopted}
    if not (runs / "heads" / "checkpoint.pt").exists():
        _carry_over("heads", "heads" in card, runs, folder)
    for name in recipe.variants:
        if name not in card["members"]:
            _carry_over(name, False, runs, folder)
    _write_card(folder, card)
    size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    if size > LIMIT:
        raise ModelError(f"{folder} takes {size / 2**20:.1f} MiB; allowed is at most {LIMIT // 2**20} MiB.")
    return folder


def _carry_over(name: str, fits: bool, runs: Path, folder: Path) -> None:
    """Copy adopted members that fit the target; remove others of an earlier export."""
    if fits:
        shutil.copytree(runs / ADOPTED / name, folder / name, dirs_exist_ok=True)
    else:
        shutil.rmtree(folder / name, ignore_errors=True)


def _adopted_card(runs: Path) -> dict[str, Any]:
    path = runs / ADOPTED / "card.json"
    card: dict[str, Any] = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    return card


def _write_trained(recipe: TrainingRecipe, name: str, tokenizer: Tokenizer, runs: Path, folder: Path) -> dict[str, Any]:
    """Export one member from its checkpoint; return its entry of the card."""
    if name in recipe.variants:
        adapter = load_adapter(recipe, name, load_trained(recipe, "target", tokenizer, runs), runs)
        adapter.save(folder / name, "../target", recipe.variants[name])
        parameters = count(adapter)
    else:
        model = load_trained(recipe, name, tokenizer, runs)
        save_model(model, folder / name, runs / "tokenizer", end_token(tokenizer))
        parameters = count(model)
    return {"role": recipe.role(name), "parameters": parameters, **_training(recipe, runs, name)}


def save_model(model: LlamaForCausalLM, folder: Path, tokenizer: Path, end: int) -> None:
    """Save a Hugging Face model folder with bf16 weights; ``tokenizer`` is the folder of the tokenizer files."""
    torch.nn.Module.to(model, torch.bfloat16)
    model.generation_config = GenerationConfig(eos_token_id=end, pad_token_id=end)
    model.save_pretrained(folder)
    for name in TOKENIZER_FILES:
        if (tokenizer / name).exists():
            shutil.copyfile(tokenizer / name, folder / name)


def count(model: torch.nn.Module) -> int:
    """Return the number of parameters; shared parameters count once."""
    return sum(parameter.numel() for parameter in model.parameters())


def _training(recipe: TrainingRecipe, runs: Path, name: str) -> dict[str, Any]:
    """Return the training figures of a continued member: in total, and ``before``."""
    state = torch.load(runs / name / "checkpoint.pt", map_location="cpu", weights_only=True)
    done = {
        "tokens": state["step"] * recipe.schedule(name).batch_tokens,
        "steps": state["step"],
        "hours": state["seconds"] / 3600,
    }
    before = origin(name, runs)
    if before is None:
        return done
    earlier = {key: before.get(key, 0) for key in done} | {k: before[k] for k in ("before",) if k in before}
    return {key: value + earlier[key] for key, value in done.items()} | {"before": earlier}


def measure(recipe: TrainingRecipe, runs: Path, folder: Path) -> dict[str, Any]:
    """Measure the members in ``runs`` on held-out text; fill the card of ``export`` in ``folder``.

    Adopted members keep their losses and samples. Acceptance is measured again, with one text for all drafters.

    Returns:
        The card's new content.
    """
    path = folder / "card.json"
    if not path.exists():
        raise ModelError(f"{folder} holds no card.json; allowed is a folder of `cospec train export`.")
    card: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    tokenizer = load_tokenizer(runs / "tokenizer")
    corpus = Corpus.load(runs / "tokens")
    models = {name: load_trained(recipe, name, tokenizer, runs) for name in card["members"]}
    for name, model in models.items():
        if "losses" not in card["members"][name]:
            losses = heldout_losses(model, tokenizer, corpus, recipe.context)
            card["members"][name]["losses"] = {domain: _rounded(loss) for domain, loss in losses.items()}
    writer = engine_writer(folder / "target")
    if len(models) > 1:
        answers = {t: heldout_answers(writer, corpus, tokenizer, t) for t in TEMPERATURES}
        card["agreement"] = {f"{t:g}": _agreements(models, texts) for t, texts in answers.items()}
        prompts = {domain: [prompt for prompt, _ in documents] for domain, documents in answers[0.0].items()}
        drafters = [folder / name for name in models if name != "target" and name not in recipe.variants]
        card["acceptance"] = acceptances(folder / "target", drafters, prompts, TEMPERATURES)
    if "samples" not in card:
        card["samples"] = {
            domain: text + tokenizer.decode(writer([tokenizer.encode(text).ids], 128, SAMPLED_AT, 1)[0])
            for domain, text in SAMPLES.items()
        }
        card["sampled_at"] = SAMPLED_AT
    card["machine"] = {**machine("auto"), "date": datetime.date.today().isoformat()}
    _write_card(folder, card)
    return card


def _agreements(models: Mapping[str, LlamaForCausalLM], texts: Mapping[str, Documents]) -> dict[str, Any]:
    """Return agreement by model and domain, for every model except the target."""
    others = {name: model for name, model in models.items() if name != "target"}
    by_domain = {domain: agreements(others, models["target"], text) for domain, text in texts.items()}
    return {name: {domain: _rounded(found[name]) for domain, found in by_domain.items()} for name in others}


def _rounded(figures: TextLoss | Agreement) -> dict[str, float]:
    return {name: round(value, 4) for name, value in asdict(figures).items()}


def amend(folder: Path, **entries: Any) -> None:
    """Add values to the card in ``folder``, if the card exists."""
    path = folder / "card.json"
    if path.exists():
        _write_card(folder, {**json.loads(path.read_text(encoding="utf-8")), **entries})


def _write_card(folder: Path, card: dict[str, Any]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "card.json").write_text(json.dumps(card, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    (folder / "README.md").write_text(render(card), encoding="utf-8")
