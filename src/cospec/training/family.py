"""The stages of a family's training: tokenizer, target, and variants of the target.

Each stage resumes from its folder. A variant is a low-rank adapter of the target that is trained on another mixture of
domains. Collaborative decoding (CoS) combines models of comparable size with different knowledge, such as variants.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from cospec.errors import InvalidInput, ModelError
from cospec.models.lora import is_adapter, merge, read_adapter
from cospec.training.corpus import DOMAINS, END, Corpus, end_token, read_domain, split
from cospec.training.lora import Adapter
from cospec.training.recipe import ModelShape, TrainingRecipe, VariantConfig
from cospec.training.trainer import Trainer, next_token_loss, restore

ADOPTED = "adopted"  # folder in a run, with the family that the run continues
ORIGIN = "origin.json"  # in a member's folder: the card's entry of the initial weights
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")


def prepare(recipe: TrainingRecipe, data: Path, out: Path) -> tuple[Tokenizer, Corpus]:
    """Train the tokenizer if missing, then tokenise the corpus."""
    folder = out / "tokenizer"
    if not (folder / "tokenizer.json").exists():
        texts = (text for name in DOMAINS for text in split(read_domain(name, data), 0.02)[0])
        made = out / "tokenizer.new"  # renamed when complete, because the files are written one after the other
        train_tokenizer(texts, recipe.vocab_size, recipe.context, made)
        shutil.rmtree(folder, ignore_errors=True)
        os.replace(made, folder)
    tokenizer = load_tokenizer(folder)
    return tokenizer, Corpus.build(tokenizer, data, out / "tokens")


def load_tokenizer(folder: Path) -> Tokenizer:
    """Load the tokenizer of a run.

    Raises:
        ModelError: ``folder`` has no tokenizer.
    """
    path = folder / "tokenizer.json"
    if not path.exists():
        raise ModelError(f"{folder} holds no tokenizer; allowed is a folder of `cospec train tokenizer`.")
    return Tokenizer.from_file(str(path))


def new_model(shape: ModelShape, recipe: TrainingRecipe, tokenizer: Tokenizer, seed: int) -> LlamaForCausalLM:
    """Build a Llama with tied embeddings and small random weights."""
    torch.manual_seed(seed)
    end = end_token(tokenizer)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=recipe.vocab_size,
            max_position_embeddings=recipe.context,
            tie_word_embeddings=True,
            bos_token_id=None,
            eos_token_id=end,
            pad_token_id=end,
            **shape.model_dump(),
        )
    )


def adopt(family: Path, out: Path) -> None:
    """Copy an exported family's tokenizer, models and card into ``out``, except members that ``out`` has trained.

    Raises:
        ModelError: ``family`` has no target, or ``out`` has another tokenizer.
    """
    if not (family / "target" / "config.json").exists():
        raise ModelError(f"{family} holds no target; allowed is a folder of `cospec train export`.")
    own, family_tokenizer = out / "tokenizer" / "tokenizer.json", family / "target" / "tokenizer.json"
    if own.exists() and family_tokenizer.exists() and own.read_bytes() != family_tokenizer.read_bytes():
        raise ModelError(
            f"{out} has another tokenizer than {family}; allowed is an empty folder, or the same tokenizer."
        )
    (out / "tokenizer").mkdir(parents=True, exist_ok=True)
    for name in TOKENIZER_FILES:
        if (family / "target" / name).exists() and not (out / "tokenizer" / name).exists():
            shutil.copyfile(family / "target" / name, out / "tokenizer" / name)
    shutil.copytree(family, out / ADOPTED, dirs_exist_ok=True)


def continue_training(name: str, out: Path) -> None:
    """Let the training of an adopted member start from its weights, unless the training has begun."""
    if (out / name / "checkpoint.pt").exists():
        return
    if not (out / ADOPTED / name / "model.safetensors").exists():
        raise ModelError(f"{out / ADOPTED} holds no {name} to continue; allowed is a family with this member.")
    card = out / ADOPTED / "card.json"
    members = json.loads(card.read_text(encoding="utf-8"))["members"] if card.exists() else {}
    (out / name).mkdir(parents=True, exist_ok=True)
    (out / name / ORIGIN).write_text(json.dumps(members.get(name, {})), encoding="utf-8")


def origin(name: str, out: Path) -> dict[str, Any] | None:
    """Return the card's entry of a member's initial weights; None for random weights."""
    path = out / name / ORIGIN
    return dict(json.loads(path.read_text(encoding="utf-8"))) if path.exists() else None


def load_trained(recipe: TrainingRecipe, name: str, tokenizer: Tokenizer, out: Path) -> LlamaForCausalLM:
    """Load a member's newest checkpoint, or the adopted member, in evaluation mode.

    A variant is the target with its adapter merged.

    Raises:
        ModelError: no weights exist, or the weights have another shape.
    """
    if name in recipe.variants:
        return _load_variant(recipe, name, tokenizer, out)
    path, adopted = out / name / "checkpoint.pt", out / ADOPTED / name
    model = new_model(recipe.shape(name), recipe, tokenizer, recipe.seed)
    if path.exists():
        restore(model, torch.load(path, map_location="cpu", weights_only=True)["model"], path)
    elif (adopted / "model.safetensors").exists():
        weights = load_file(adopted / "model.safetensors")
        # Tied embeddings are stored once.
        restore(model, {"lm_head.weight": weights["model.embed_tokens.weight"], **weights}, adopted)
    else:
        raise _missing(out, name, name if name in ("target", "drafter") else "drafters")
    model.requires_grad_(False)
    model.eval()
    torch.nn.Module.to(model, "cuda" if torch.cuda.is_available() else "cpu")
    return model


def _load_variant(recipe: TrainingRecipe, name: str, tokenizer: Tokenizer, out: Path) -> LlamaForCausalLM:
    model = load_trained(recipe, "target", tokenizer, out)
    if (out / name / "checkpoint.pt").exists():
        load_adapter(recipe, name, model, out).merge(model)
    elif is_adapter(out / ADOPTED / name):
        merge(model, read_adapter(out / ADOPTED / name))
    else:
        raise _missing(out, name, "variants")
    return model


def load_adapter(recipe: TrainingRecipe, name: str, target: LlamaForCausalLM, out: Path) -> Adapter:
    """Load a variant's factors from its newest checkpoint, not attached to ``target``."""
    path = out / name / "checkpoint.pt"
    adapter = Adapter(target, recipe.variants[name], recipe.seed).requires_grad_(False)
    restore(adapter, torch.load(path, map_location="cpu", weights_only=True)["model"], path)
    torch.nn.Module.to(adapter, target.device)
    return adapter


def _missing(out: Path, name: str, stage: str) -> ModelError:
    return ModelError(f"{out} holds no {name}; allowed is a folder after `cospec train {stage}`.")


def train_target(recipe: TrainingRecipe, data: Path, out: Path, compiled: bool = False) -> Trainer:
    """Train the target by next-token prediction, from random weights or adopted weights (``continue_training``)."""
    tokenizer, corpus = prepare(recipe, data, out)
    schedule, before = recipe.target_schedule, origin("target", out)
    first = (before or {}).get("steps", 0)  # the weights have seen the windows of these steps

    def batches(step: int) -> np.ndarray:
        return corpus.windows(recipe.mixture, schedule.rows, schedule.sequence, (recipe.seed, 0, first + step))

    if before is None:
        model = new_model(recipe.target, recipe, tokenizer, recipe.seed)
    else:
        model = load_trained(recipe, "target", tokenizer, out).requires_grad_(True)
    trainer = Trainer(model, schedule, next_token_loss, batches, out / "target")
    trainer.run(compiled=compiled)
    return trainer


# The maths text reads "Question: ... / Answer: ...", so the chat template uses the same words.
CHAT_TEMPLATE = (
    "{% for m in messages %}"
    "{% if m['role'] == 'user' %}Question: {{ m['content'] }}\n"
    "{% elif m['role'] == 'assistant' %}Answer: {{ m['content'] }}<|endoftext|>"
    "{% else %}{{ m['content'] }}\n{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}Answer:{% endif %}"
)


def train_tokenizer(texts: Iterable[str], vocab_size: int, context: int, out: Path) -> Tokenizer:
    """Train on ``texts`` and save to ``out``. Digits are single tokens, so that numbers keep place values."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.train_from_iterator(
        texts,
        trainers.BpeTrainer(
            vocab_size=vocab_size,
            special_tokens=[END],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=None,
        eos_token=END,
        pad_token=END,
        model_max_length=context,
        clean_up_tokenization_spaces=False,
        chat_template=CHAT_TEMPLATE,
    ).save_pretrained(out)
    return tokenizer


def train_variants(recipe: TrainingRecipe, data: Path, out: Path, names: Sequence[str] = ()) -> dict[str, Trainer]:
    """Train the recipe's variants of the target in ``out``. Resumes from checkpoints in ``out``.

    Args:
        names: of the variants; empty means all.

    Raises:
        InvalidInput: a name is not one of the recipe's variants.
    """
    for name in names:
        if name not in recipe.variants:
            allowed = ", ".join(recipe.variants) or "none, because the recipe has no variants"
            raise InvalidInput("name", name, f"one of {allowed}" if recipe.variants else allowed)
    tokenizer, corpus = prepare(recipe, data, out)
    trainers = {}
    for name in names or recipe.variants:
        variant = recipe.variants[name]
        base = load_trained(recipe, "target", tokenizer, out)
        adapter = Adapter(base, variant, recipe.seed)
        adapter.attach(base)

        def loss(_adapter: nn.Module, rows: Tensor, base: nn.Module = base) -> Tensor:
            return next_token_loss(base, rows)

        batches = partial(_batch, corpus, variant, recipe.seed)
        trainers[name] = Trainer(adapter, variant.schedule, loss, batches, out / name)
        trainers[name].run()
    return trainers


def _batch(corpus: Corpus, variant: VariantConfig, seed: int, step: int) -> np.ndarray:
    # The third number separates these windows from the windows of the target's training.
    schedule = variant.schedule
    return corpus.windows(variant.mixture, schedule.rows, schedule.sequence, (seed, 4, step))
