"""What a target thinks of many windows of text, kept on disk for its drafter to learn from.

Reading is most of a distillation's work: a target of 22M parameters costs twenty times what its drafter does. So it
reads every window once, and its last hidden states are kept (two bytes per unit, as against two per entry of the
vocabulary for its logits); one product with the output embedding turns them into logits again, as often as needed.
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
from cospec.training.progress import bars


def fingerprint(model: torch.nn.Module) -> str:
    """Twelve hexadecimal digits that change with any weight, so that what another target wrote is not reused."""
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
        """Rows by number: tokens ``int64 [B, T + 1]`` and states ``float32 [B, T, H]``."""
        chosen = numbers.cpu().numpy()
        tokens = torch.from_numpy(self.tokens[chosen].astype(np.int64))
        return tokens.to(device), torch.from_numpy(self.states[chosen]).to(device).float()


def read(target: LlamaForCausalLM, windows: np.ndarray, folder: Path, rows: int = 4) -> TeacherCache:
    """Let ``target`` read ``windows [N, T + 1]``, or go on where an earlier call stopped.

    Args:
        rows: windows per forward pass.
    """
    folder.mkdir(parents=True, exist_ok=True)
    windows = windows.astype(np.uint16)
    path, mark = folder / "states.npy", folder / "read.txt"
    shape = (len(windows), windows.shape[1] - 1, target.config.hidden_size)
    done = _done(mark) if _same(folder / "tokens.npy", windows) else 0
    if done == 0:
        mark.unlink(missing_ok=True)  # before what it counts is written over
        save_array(folder / "tokens.npy", windows)
        np.lib.format.open_memmap(path, mode="w+", dtype=np.float16, shape=shape).flush()
    states = np.lib.format.open_memmap(path, mode="r+")
    with bars() as progress, torch.no_grad():
        bar = progress.add_task("target reads", total=len(windows), completed=done)
        for start in range(done, len(windows), rows):
            part = torch.from_numpy(windows[start : start + rows, :-1].astype(np.int64)).to(target.device)
            with torch.autocast(target.device.type, torch.bfloat16):
                hidden = target.model(input_ids=part).last_hidden_state
            states[start : start + rows] = hidden.half().cpu().numpy()
            states.flush()
            _replace(mark, str(min(start + rows, len(windows))))
            progress.update(bar, completed=start + len(part))
    return TeacherCache(windows, np.load(path, mmap_mode="r"))


def _done(mark: Path) -> int:
    return int(mark.read_text()) if mark.exists() else 0


def _replace(path: Path, text: str) -> None:
    """An interruption leaves the old text or the new one."""
    path.with_suffix(".new").write_text(text)
    path.with_suffix(".new").replace(path)


def _same(path: Path, windows: np.ndarray) -> bool:
    return path.exists() and np.array_equal(np.load(path), windows)
