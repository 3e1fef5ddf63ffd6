"""Medusa heads: small layers on a target's last hidden state that predict the tokens after the next token.

Head ``i`` (from 0) reads the state before the output layer and predicts the token ``i + 1`` places after the next
token: ``logits = E (x + silu(W_i x + b_i))`` with the target's output embedding ``E`` (Cai et al. 2024, section 2.1;
SmartSpec section 7.2.2). The shared ``E`` keeps four heads of a 22M target at 1M parameters.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from cospec.errors import ModelError
from cospec.models.files.source import OUTPUT_EMBEDDINGS
from cospec.models.files.weight_source_selection import open_source
from cospec.models.linear import LINEAR, choose_linear
from cospec.models.model_folder import ZOO
from cospec.models.weights.bf16 import Bf16
from cospec.models.weights.format import TORCH_DTYPES, WeightFormat, choose_format
from cospec.plugin_options import WeightOptions

STORED = Bf16()  # the format of the files
WEIGHTS, FACTS = "heads.safetensors", "heads.json"


@dataclass(frozen=True, slots=True, eq=False)
class MedusaHeads:
    """Trained heads.

    Attributes:
        weight: ``[H, hidden, hidden]``; ``bias`` is ``[H, hidden]``.
        accuracy: ``accuracy[h][r]``, the share of correct predictions of rank ``r`` of head ``h``, measured on held-out
            text of the target.
    """

    weight: Tensor
    bias: Tensor
    accuracy: tuple[tuple[float, ...], ...]

    def save(self, folder: Path) -> None:
        """Save bf16 weights and the measured accuracy."""
        folder.mkdir(parents=True, exist_ok=True)
        tensors = {"weight": self.weight.bfloat16().contiguous(), "bias": self.bias.bfloat16().contiguous()}
        save_file(tensors, folder / WEIGHTS)
        (folder / FACTS).write_text(json.dumps({"accuracy": self.accuracy}, indent=2) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, folder: Path) -> MedusaHeads:
        """Load heads that ``save`` wrote.

        Raises:
            ModelError: the folder has no heads.
        """
        try:
            tensors = load_file(folder / WEIGHTS)
            facts = json.loads((folder / FACTS).read_text(encoding="utf-8"))
            accuracy = tuple(tuple(map(float, row)) for row in facts["accuracy"])
            return cls(tensors["weight"].float(), tensors["bias"].float(), accuracy)
        except (OSError, SafetensorError, ValueError, KeyError) as error:
            wanted = f"a folder with {WEIGHTS} and {FACTS}, such as `cospec train heads` writes"
            raise ModelError(f"{folder} has no heads ({type(error).__name__}); allowed is {wanted}.") from None


def resolve_medusa_heads(name: str) -> Path:
    """Return the folder of ``zoo:NAME``, or the folder."""
    return ZOO / name.removeprefix("zoo:") if name.startswith("zoo:") else Path(name).expanduser()


def heads_format(options: WeightOptions, device: torch.device) -> WeightFormat:
    """Return the format of heads in memory; without options the format of the files.

    Raises:
        InvalidInput: the device does not compute with the format.
    """
    dtype = STORED.dtype if options.dtype in (None, "auto") else TORCH_DTYPES[options.dtype]
    return choose_format(options.quantization, dtype, device, "speculative_config.quantization")


def output_embedding(folder: Path) -> Tensor:
    """Return ``E [V, hidden]`` of a model's folder, float32.

    Raises:
        ModelError: the weights have no tensor of a known name.
    """
    source = open_source(folder)
    for wanted in OUTPUT_EMBEDDINGS:
        if wanted in source.shapes:
            return source.read(wanted).float()
    raise ModelError(f"The weights in {folder} have no output embedding; allowed is {' or '.join(OUTPUT_EMBEDDINGS)}.")


class MedusaModule(nn.Module):
    """The heads in training; zero weights give the target's output, which is a fair first prediction."""

    def __init__(self, count: int, hidden: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(hidden, hidden) for _ in range(count))
        for parameter in self.parameters():
            nn.init.zeros_(parameter)

    def forward(self, states: Tensor, head: int) -> Tensor:
        """Return the state ``[R, hidden]`` of one head, which ``E`` turns into logits."""
        inner: Tensor = self.blocks[head](states)
        return states + F.silu(inner)

    def heads(self, accuracy: Sequence[Sequence[float]]) -> MedusaHeads:
        """Return these weights with their measured accuracy."""
        state = {name: value.detach().cpu().float() for name, value in self.named_parameters()}
        weight, bias = (
            torch.stack([state[f"blocks.{n}.{part}"] for n in range(len(self.blocks))]) for part in ("weight", "bias")
        )
        return MedusaHeads(weight, bias, tuple(tuple(row) for row in accuracy))


class MedusaRunner:
    """Computes all heads of a batch of states in two products.

    Args:
        embedding: ``E [V, hidden]``.
        format: of both weights.
    """

    def __init__(
        self, heads: MedusaHeads, embedding: Tensor, device: torch.device, format: WeightFormat = STORED
    ) -> None:
        self.count, hidden, _ = heads.weight.shape
        build = LINEAR[choose_linear("auto", device)]
        self._blocks = build(format.read(heads.weight.flatten(0, 1).to(device)), heads.bias.flatten().to(device))
        self._output = build(format.read(embedding.to(device)), None)
        self._hidden = hidden

    @torch.no_grad()
    def logits(self, states: Tensor, depth: int) -> Tensor:
        """Return ``[S, depth, V]`` of the first ``depth`` heads, from states ``[S, hidden]``."""
        inner = F.silu(self._blocks(states)).unflatten(-1, (self.count, self._hidden))[:, :depth]
        flat: Tensor = self._output((states[:, None] + inner).flatten(0, 1))
        return flat.view(len(states), depth, -1)
