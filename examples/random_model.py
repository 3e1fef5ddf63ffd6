"""Make a folder with random weights in the shape of a model that people use, to try commands without a download.

The folder has the model's configuration, random bfloat16 weights and the zoo's tokenizer: speed and memory are those of
the model, the text means nothing.

python examples/random_model.py SmolLM2-135M runs/random/SmolLM2-135M
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

SMOLLM2: dict[str, Any] = {
    "model_type": "llama", "vocab_size": 49152, "max_position_embeddings": 8192, "tie_word_embeddings": True,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e5}, "rms_norm_eps": 1e-5,
}  # fmt: skip
MODELS: dict[str, dict[str, Any]] = {
    "SmolLM2-135M": {
        **SMOLLM2, "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30, "num_attention_heads": 9,
        "num_key_value_heads": 3,
    },
    "SmolLM2-360M": {
        **SMOLLM2, "hidden_size": 960, "intermediate_size": 2560, "num_hidden_layers": 32, "num_attention_heads": 15,
        "num_key_value_heads": 5,
    },
    "Qwen3-0.6B": {
        "model_type": "qwen3", "vocab_size": 151936, "hidden_size": 1024, "intermediate_size": 3072,
        "num_hidden_layers": 28, "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128,
        "max_position_embeddings": 40960, "tie_word_embeddings": True, "rms_norm_eps": 1e-6,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
    },
    "Llama-3.2-1B": {
        "model_type": "llama", "vocab_size": 128256, "hidden_size": 2048, "intermediate_size": 8192,
        "num_hidden_layers": 16, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 64,
        "max_position_embeddings": 131072, "tie_word_embeddings": True, "rms_norm_eps": 1e-5,
        "rope_parameters": {
            "rope_type": "llama3", "rope_theta": 5e5, "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
    },
}  # fmt: skip


def make(name: str, folder: Path, seed: int = 0) -> Path:
    """Write the folder; the seed makes its weights repeatable.

    Args:
        name: one of ``MODELS``.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    from cospec.models.model_folder import resolve

    shape = dict(MODELS[name])
    config = AutoConfig.for_model(shape.pop("model_type"), **shape, bos_token_id=None, eos_token_id=None)
    torch.manual_seed(seed)
    AutoModelForCausalLM.from_config(config).bfloat16().save_pretrained(folder)
    AutoTokenizer.from_pretrained(resolve("zoo")).save_pretrained(folder)
    return folder


def main() -> None:
    """Make the folder that the command line names."""
    parser = argparse.ArgumentParser(description="Make a folder with random weights in the shape of a known model.")
    parser.add_argument("name", choices=MODELS)
    parser.add_argument("folder", type=Path)
    given = parser.parse_args()
    print(f"{given.name} with random weights is in {make(given.name, given.folder)}.")


if __name__ == "__main__":
    main()
