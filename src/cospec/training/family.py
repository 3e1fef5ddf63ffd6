"""The stages of a family's training: tokenizer, target, drafter. Each resumes from what its folder holds."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer
from transformers import LlamaConfig, LlamaForCausalLM

from cospec.errors import ModelError
from cospec.training.corpus import DOMAINS, Corpus, end_token, read_domain, split
from cospec.training.recipe import ModelShape, Recipe
from cospec.training.tokenizer import train_tokenizer
from cospec.training.trainer import Trainer, next_token_loss, restore


def prepare(recipe: Recipe, data: Path, out: Path) -> tuple[Tokenizer, Corpus]:
    """Train the tokenizer unless it is there, then tokenise the corpus."""
    folder = out / "tokenizer"
    if not (folder / "tokenizer.json").exists():
        texts = (text for name in DOMAINS for text in split(read_domain(name, data), 0.02)[0])
        train_tokenizer(texts, recipe.vocab_size, recipe.context, folder)
    tokenizer = load_tokenizer(folder)
    return tokenizer, Corpus.build(tokenizer, data, out / "tokens")


def load_tokenizer(folder: Path) -> Tokenizer:
    """The tokenizer that a run trained.

    Raises:
        ModelError: ``folder`` holds none.
    """
    path = folder / "tokenizer.json"
    if not path.exists():
        raise ModelError(f"{folder} holds no tokenizer; allowed is a folder that `cospec train tokenizer` wrote.")
    return Tokenizer.from_file(str(path))


def new_model(shape: ModelShape, recipe: Recipe, tokenizer: Tokenizer, seed: int) -> LlamaForCausalLM:
    """A Llama with tied embeddings and small initial weights."""
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


def load_trained(recipe: Recipe, name: str, tokenizer: Tokenizer, out: Path) -> LlamaForCausalLM:
    """The ``target`` or ``drafter`` as its newest checkpoint has it, in evaluation mode, not to be trained further.

    Raises:
        ModelError: there is no checkpoint, or it holds another shape.
    """
    path = out / name / "checkpoint.pt"
    if not path.exists():
        raise ModelError(f"{out} holds no {name}; allowed is a folder in which `cospec train {name}` ran.")
    model = new_model(recipe.target if name == "target" else recipe.drafter, recipe, tokenizer, recipe.seed)
    restore(model, torch.load(path, map_location="cpu", weights_only=True)["model"], path)
    model.requires_grad_(False)
    model.eval()
    torch.nn.Module.to(model, "cuda" if torch.cuda.is_available() else "cpu")
    return model


def train_target(recipe: Recipe, data: Path, out: Path, compiled: bool = False) -> Trainer:
    """Train the target on the corpus by next-token prediction."""
    tokenizer, corpus = prepare(recipe, data, out)
    schedule = recipe.target_schedule

    def batches(step: int) -> np.ndarray:
        return corpus.windows(recipe.mixture, schedule.rows, schedule.sequence, (recipe.seed, 0, step))

    model = new_model(recipe.target, recipe, tokenizer, recipe.seed)
    trainer = Trainer(model, schedule, next_token_loss, batches, out / "target")
    trainer.run(compiled=compiled)
    return trainer
