"""Models in transformers' code: the reference of ``verify``, and the model of compared systems."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from cospec.models.hf_logging import hf_logging_off
from cospec.models.linear import weight_of


def load_plain(folder: Path, dtype: torch.dtype, rounded: bool = False, device: str = "cpu") -> Any:
    """Load a Hugging Face causal LM in evaluation mode, with default generation settings: greedy, no end token.

    Args:
        dtype: of the arithmetic.
        rounded: round weights and inputs of linear layers to bfloat16, as the engine does on a CPU.
    """
    from transformers import AutoModelForCausalLM, GenerationConfig

    with hf_logging_off():
        model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, local_files_only=True)
    if rounded:
        for parameter in model.parameters():
            parameter.data = parameter.data.bfloat16().to(dtype)
        for module in model.modules():
            if weight_of(module) is not None:
                module.register_forward_pre_hook(lambda _, inputs: (inputs[0].bfloat16().to(dtype),))
    model.generation_config = GenerationConfig()
    return model.to(device).eval().requires_grad_(False)
