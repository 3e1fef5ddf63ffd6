"""``cospec models``: lists the models of the package."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import Any

HEAD = ("model", "role", "parameters", "layers", "width", "vocabulary", "context", "tokens in training")
SIZES = ("num_hidden_layers", "hidden_size", "vocab_size", "max_position_embeddings")
# Roles of members without a role in the card.
ROLES = {
    "target": "target, which defines the output distribution",
    "drafter": "drafter of zoo:target",
    "heads": "Medusa heads on zoo:target",
}
FILES = ("config.json", "adapter_config.json", "heads.json")  # a folder with one of these files is a member
WIDTH = 140  # width of the table without a terminal


def models() -> None:
    """List the zoo: names, roles, parameters."""
    from rich.console import Console
    from rich.table import Table

    from cospec.models.model_folder import ZOO

    rows = members(ZOO)
    if not rows:
        print("This installation of cospec has no zoo models.")
        return
    table = Table(box=None)
    for name in HEAD:
        table.add_column(name, no_wrap=name == "model")  # a truncated name is useless
    for row in rows:
        table.add_row(*row)
    Console(width=None if sys.stdout.isatty() else WIDTH).print(table)


def members(zoo: Path) -> list[tuple[str, ...]]:
    """Return one row of text per model in the order of ``HEAD``; the target comes first."""
    card = _card(zoo)
    found = {path.parent for name in FILES for path in zoo.glob(f"*/{name}")}
    ordered = sorted(found, key=lambda folder: (folder.name != "target", folder.name))
    return [_row(folder, card.get(folder.name, {})) for folder in ordered]


def parameters(folder: Path) -> int:
    """Return the number of weights in a folder, read from the file headers alone."""
    from safetensors import safe_open

    total = 0
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(str(file), framework="numpy") as tensors:
            total += sum(prod(tensors.get_slice(key).get_shape()) for key in tensors.keys())  # noqa: SIM118
    return total


def _row(folder: Path, about: Mapping[str, Any]) -> tuple[str, ...]:
    from cospec.models.lora import base_folder
    from cospec.models.model_folder import read_config

    name, whole = folder.name, base_folder(folder)  # an adapter has the shape and size of its base
    shape = read_config(whole) if (whole / "config.json").exists() else {}
    role = str(about.get("role", ROLES.get(name, name)))
    trained = f"{about['tokens'] / 1e6:.1f}M" if "tokens" in about else "-"
    sizes = [str(shape.get(key, "-")) for key in SIZES]
    return (f"zoo:{name}", role, f"{parameters(whole) / 1e6:.1f}M", *sizes, trained)


def _card(zoo: Path) -> dict[str, Any]:
    """Read the entries of the members in the family's card."""
    path = zoo / "card.json"
    if not path.exists():
        return {}
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))["members"]
    return found
