"""The target's hidden states for many windows of text, cached on disk for distillation.

The target's forwards dominate a distillation: a target of 22M parameters costs twenty times its drafter. So the target
reads every window once, and its last hidden states are stored. A state takes two bytes per unit; logits would take two
bytes per vocabulary entry. One product with the output embedding restores the logits.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from transformers import LlamaForCausalLM

from cospec.training.corpus import save_array
from cospec.training.trainer import bars, mixed_precision


def fingerprint(model: torch.nn.Module) -> str:
    """Return twelve hexadecimal digits that change with any weight, so that another target's text is not reused."""
    digest = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        digest.update(name.encode())
        digest.update(tensor.detach().float().cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()[:12]


@dataclass(frozen=True)
class TeacherCache:
    """``tokens`` is ``uint16 [N, T + 1]``, ``states`` is ``float16 [N, T, H]``: the target's last hidden states."""

    tokens: np.ndarray
    states: np.ndarray

    def take(self, numbers: Tensor, device: torch.device) -> tuple[Tensor, Tensor]:
        """Return rows by number: tokens ``int64 [B, T + 1]`` and states ``float32 [B, T, H]``."""
        chosen = numbers.cpu().numpy()
        tokens = torch.from_numpy(self.tokens[chosen].astype(np.int64))
        return tokens.to(device), torch.from_numpy(self.states[chosen]).to(device).float()


def read(target: LlamaForCausalLM, windows: np.ndarray, folder: Path, rows: int = 4) -> TeacherCache:
    """Compute the states of ``windows [N, T + 1]`` with ``target``; resume an earlier call.

    Args:
        rows: windows per forward pass.
    """
    folder.mkdir(parents=True, exist_ok=True)
    windows = windows.astype(np.uint16)
    path, mark = folder / "states.npy", folder / "read.txt"
    shape = (len(windows), windows.shape[1] - 1, target.config.hidden_size)
    done = _done(mark) if _same(folder / "tokens.npy", windows) else 0
    if done == 0:
        mark.unlink(missing_ok=True)  # before its files are overwritten
        save_array(folder / "tokens.npy", windows)
        np.lib.format.open_memmap(path, mode="w+", dtype=np.float16, shape=shape).flush()
    states = np.lib.format.open_memmap(path, mode="r+")
    with bars() as progress, torch.no_grad():
        bar = progress.add_task("target reads", total=len(windows), completed=done)
        for start in range(done, len(windows), rows):
            part = torch.from_numpy(windows[start : start + rows, :-1].astype(np.int64)).to(target.device)
            with mixed_precision(target.device):
                hidden = target.model(input_ids=part).last_hidden_state
            states[start : start + rows] = hidden.half().cpu().numpy()
            states.flush()
            _replace(mark, str(min(start + rows, len(windows))))
            progress.update(bar, completed=start + len(part))
    return TeacherCache(windows, np.load(path, mmap_mode="r"))


def _done(mark: Path) -> int:
    return int(mark.read_text()) if mark.exists() else 0


def _replace(path: Path, text: str) -> None:
    """Replace a file atomically: an interruption leaves the old or the new text."""
    path.with_suffix(".new").write_text(text)
    path.with_suffix(".new").replace(path)


def _same(path: Path, windows: np.ndarray) -> bool:
    return path.exists() and np.array_equal(np.load(path), windows)
