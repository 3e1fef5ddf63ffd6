"""A server in a process of its own, over a small random Llama."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import openai

from server.fake_engine import write_tokenizer


def write_llama(folder: Path, seed: int = 0) -> Path:
    """A Llama of two layers with random weights."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    shape = LlamaConfig(
        vocab_size=257,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        bos_token_id=None,
        eos_token_id=256,
        initializer_range=0.5,
    )
    LlamaForCausalLM(shape).save_pretrained(folder)
    return write_tokenizer(folder)


UNMEASURED = Path(__file__).with_name("unmeasured.yaml")
"""A configuration without the measurement of some seconds at the start."""


class Served:
    """``cospec serve`` as a user runs it, without a measurement at the start.

    Args:
        name: that the model is served by; None leaves it to the server.
        folder: where it is started.
    """

    def __init__(self, *arguments: str, name: str | None = "m", folder: Path | None = None) -> None:
        named = () if name is None else ("--served-model-name", name)
        options = ("--config", str(UNMEASURED), "--port", "0")
        command = [sys.executable, "-m", "cospec", "serve", *arguments, *options, *named]
        self.process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, start_new_session=True, cwd=folder)
        assert self.process.stderr is not None
        said = ""
        for line in self.process.stderr:
            said += line
            if "http://" in line:
                break
        assert "http://" in line, said
        self.url = "http://" + line.strip().rpartition("http://")[2]
        self.http = httpx.Client(base_url=self.url, timeout=60)
        # untyped, as the server answers with fields that the client's types do not have
        self.openai: Any = openai.OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0)

    def stop(self) -> int:
        self.http.close()
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGTERM)
        code = self.process.wait(60)
        assert self.process.stderr is not None
        self.process.stderr.close()
        return code
