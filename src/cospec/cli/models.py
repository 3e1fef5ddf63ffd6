"""``cospec models``: the models that came with the package."""

from __future__ import annotations

import json
from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import Any

HEAD = ("model", "role", "parameters", "layers", "width", "vocabulary", "context", "tokens in training")
SIZES = ("num_hidden_layers", "hidden_size", "vocab_size", "max_position_embeddings")
ROLES = {
    "target": "target, whose law outputs follow",
    "drafter": "drafter of zoo:target",
}


def models() -> None:
    """List the zoo: names, roles, parameters."""
    from rich.console import Console
    from rich.table import Table

    from cospec.models.folder import ZOO

    rows = members(ZOO)
    if not rows:
        print("The zoo has no models: this installation of cospec came without them.")
        return
    table = Table(*HEAD, box=None)
    for row in rows:
        table.add_row(*row)
    Console().print(table)


def members(zoo: Path) -> list[tuple[str, ...]]:
    """One row of text per model, under ``HEAD``; the target comes first."""
    card = _card(zoo)
    found = sorted(zoo.glob("*/config.json"), key=lambda path: (path.parent.name != "target", path.parent.name))
    return [_row(path, card.get(path.parent.name, {})) for path in found]


def parameters(folder: Path) -> int:
    """How many numbers the weights in a folder hold, read from the headers alone."""
    from safetensors import safe_open

    total = 0
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(str(file), framework="numpy") as tensors:
            total += sum(prod(tensors.get_slice(key).get_shape()) for key in tensors.keys())  # noqa: SIM118
    return total


def _row(path: Path, about: Mapping[str, Any]) -> tuple[str, ...]:
    name, shape = path.parent.name, json.loads(path.read_text(encoding="utf-8"))
    role = str(about.get("role", ROLES.get(name, name)))
    trained = f"{about['tokens'] / 1e6:.1f}M" if "tokens" in about else "-"
    sizes = [str(shape.get(key, "-")) for key in SIZES]
    return (f"zoo:{name}", role, f"{parameters(path.parent) / 1e6:.1f}M", *sizes, trained)


def _card(zoo: Path) -> dict[str, Any]:
    """What the family's card says of each member."""
    path = zoo / "card.json"
    if not path.exists():
        return {}
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))["members"]
    return found
