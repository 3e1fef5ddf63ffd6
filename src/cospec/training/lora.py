"""A low-rank adapter in training: factors parallel to the linear layers of a frozen model (LoRA, Hu et al. 2021).

Training and checkpoints cover the factors only. The export is a PEFT folder, which ``models/lora.py`` merges into the
base.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import LlamaForCausalLM

from cospec.models.lora import CONFIG, WEIGHTS
from cospec.training.recipe import VariantConfig


class Factors(nn.Module):
    """``A [r, in]``, small and random, and ``B [out, r]``, zero, so that training starts from the base."""

    def __init__(self, layer: nn.Linear, rank: int, scale: float) -> None:
        super().__init__()
        self.scale = scale
        self.a = nn.Parameter(torch.empty(rank, layer.in_features).uniform_(-1, 1) / math.sqrt(layer.in_features))
        self.b = nn.Parameter(torch.zeros(layer.out_features, rank))

    def forward(self, inputs: Tensor) -> Tensor:
        """Return the addition to the layer's output."""
        return self.scale * nn.functional.linear(nn.functional.linear(inputs, self.a), self.b)

    def update(self) -> Tensor:
        """Return the addition to the layer's weight ``[out, in]``."""
        return self.scale * self.b.detach() @ self.a.detach()


class Adapter(nn.Module):
    """Factors for every linear layer of a model's decoder; the model is not part of the module."""

    def __init__(self, base: LlamaForCausalLM, variant: VariantConfig, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        names = [name for name, layer in base.model.named_modules() if isinstance(layer, nn.Linear)]
        self.layers = {
            name: Factors(base.model.get_submodule(name), variant.rank, variant.alpha / variant.rank) for name in names
        }
        self.factors = nn.ModuleList(self.layers.values())

    def attach(self, base: LlamaForCausalLM) -> None:
        """Make ``base`` compute with the factors, with gradients of the factors."""
        for name, factors in self.layers.items():
            base.model.get_submodule(name).register_forward_hook(
                lambda _layer, inputs, output, factors=factors: output + factors(inputs[0])
            )

    @torch.no_grad()
    def merge(self, base: LlamaForCausalLM) -> None:
        """Add the factors to the weights of ``base`` permanently."""
        for name, factors in self.layers.items():
            base.model.get_submodule(name).weight += factors.update()

    def save(self, folder: Path, base: str, variant: VariantConfig) -> None:
        """Save a PEFT folder in bf16; ``base`` is the relative path of the base model."""
        folder.mkdir(parents=True, exist_ok=True)
        tensors = {}
        for name, factors in self.layers.items():
            for side, factor in (("A", factors.a), ("B", factors.b)):
                key = f"base_model.model.model.{name}.lora_{side}.weight"
                tensors[key] = factor.detach().to("cpu", torch.bfloat16).contiguous()
        save_file(tensors, folder / WEIGHTS, {"format": "pt"})
        config: dict[str, Any] = {
            "peft_type": "LORA",
            "task_type": "CAUSAL_LM",
            "base_model_name_or_path": base,
            "r": variant.rank,
            "lora_alpha": variant.alpha,
            "lora_dropout": 0.0,
            "bias": "none",
            "fan_in_fan_out": False,
            "init_lora_weights": True,
            "inference_mode": True,
            "target_modules": sorted({name.rpartition(".")[2] for name in self.layers}),
        }
        (folder / CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
