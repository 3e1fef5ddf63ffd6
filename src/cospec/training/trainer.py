"""The training loop: mixed precision, a resumable checkpoint, a progress bar.

Muon trains hidden matrices and AdamW everything else. Orthogonalised updates learn about twice as much per token at the
batch sizes of a CPU.
"""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import cast

import numpy as np
import torch
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from torch import Tensor, nn

from cospec.errors import ModelError
from cospec.native.library import available, offered
from cospec.training.recipe import TrainingSchedule

Loss = Callable[[nn.Module, Tensor], Tensor]
Batches = Callable[[int], np.ndarray]

BF16_INSTRUCTION_SETS = frozenset(("avx512_bf16", "amx_bf16"))


def next_token_loss(model: nn.Module, rows: Tensor) -> Tensor:
    """Return the mean cross-entropy, in nats, of ``rows [B, T + 1]``."""
    logits = model(input_ids=rows[:, :-1]).logits.float()
    return nn.functional.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten())


def rate(step_tokens: int, schedule: TrainingSchedule) -> float:
    """Return the share of the peak learning rate: a linear warm-up, a plateau, a linear fall to zero."""
    done = min(1.0, step_tokens / schedule.tokens)
    rising = done / schedule.warmup if schedule.warmup else 1.0
    falling = (1 - done) / schedule.decay if schedule.decay else 1.0
    return max(0.0, min(1.0, rising, falling))


def mixed_precision(device: torch.device) -> torch.autocast:
    """Return a context with products in bf16, or in float32 on a CPU without bf16 instructions.

    Such a CPU emulates bf16, and a product takes much longer than in float32.
    """
    fast = device.type != "cpu" or (available() and not BF16_INSTRUCTION_SETS.isdisjoint(offered()))
    return torch.autocast(device.type, torch.bfloat16, enabled=fast)


def restore(model: nn.Module, weights: dict[str, Tensor], path: Path) -> None:
    """Load a checkpoint's ``weights`` into ``model``.

    Raises:
        ModelError: the weights have another shape.
    """
    try:
        model.load_state_dict(weights)
    except RuntimeError:
        raise ModelError(
            f"{path} holds a model of another shape than the recipe's; allowed is the recipe of the checkpoint, "
            "or another output folder."
        ) from None


class Trainer:
    """Runs one schedule for one model; ``folder`` holds the checkpoint and the log.

    Args:
        loss: maps (model, rows ``[B, T + 1]``) to a scalar loss in nats per token.
        batches: maps a step number to its rows, so that a resumed run sees the same rows as an uninterrupted run.
    """

    def __init__(
        self, model: nn.Module, schedule: TrainingSchedule, loss: Loss, batches: Batches, folder: Path
    ) -> None:
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.model = model.to(self.device)
        self.schedule, self.loss, self.batches, self.folder = schedule, loss, batches, folder
        matrices = [p for n, p in model.named_parameters() if p.ndim == 2 and "embed" not in n and "lm_head" not in n]
        chosen = {id(p) for p in matrices}
        others = [p for p in model.parameters() if id(p) not in chosen]
        self.optimizers: list[torch.optim.Optimizer] = [
            torch.optim.Muon(matrices, lr=schedule.matrix_lr, weight_decay=0.01, adjust_lr_fn="match_rms_adamw")
        ]
        if others:  # an adapter has matrices only
            adam = torch.optim.AdamW(others, lr=schedule.other_lr, betas=(0.9, 0.95), weight_decay=0.0, fused=True)
            self.optimizers.append(adam)
        self.peaks = (schedule.matrix_lr, schedule.other_lr)[: len(self.optimizers)]
        self.step, self.seconds = 0, 0.0
        folder.mkdir(parents=True, exist_ok=True)
        self._resume()

    def run(self, save_every: float = 240.0, compiled: bool = False) -> None:
        """Train to the end of the schedule; save every ``save_every`` seconds and at the end."""
        total = math.ceil(self.schedule.tokens / self.schedule.batch_tokens)
        # compile() returns a callable that forwards attributes to the wrapped module.
        model = cast(nn.Module, torch.compile(self.model)) if compiled else self.model
        self.model.train()
        saved = time.monotonic()
        with bars() as progress, self._log().open("a", encoding="utf-8") as log:
            bar = progress.add_task(f"training {self.folder.name}", total=total, completed=self.step)
            while self.step < total:
                started = time.monotonic()
                value = self._train_step(model)
                self.seconds += time.monotonic() - started
                if not math.isfinite(value):
                    raise ModelError(
                        f"The loss of {self.folder.name} is {value} at step {self.step}; allowed is a recipe with "
                        "lower learning rates, which resumes from the last checkpoint."
                    )
                log.write(json.dumps({"step": self.step, "loss": round(value, 4), "s": round(self.seconds, 1)}) + "\n")
                log.flush()
                progress.update(bar, completed=self.step, description=f"{self.folder.name}, loss {value:.3f}")
                if time.monotonic() - saved > save_every:
                    self.save()
                    saved = time.monotonic()
        self.save()

    def _train_step(self, model: nn.Module) -> float:
        rows = torch.from_numpy(self.batches(self.step)).to(self.device)
        share = rate((self.step + 1) * self.schedule.batch_tokens, self.schedule)
        for optimizer, peak in zip(self.optimizers, self.peaks, strict=True):
            for group in optimizer.param_groups:
                group["lr"] = peak * share
        with mixed_precision(self.device):
            loss = self.loss(model, rows)
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        self.step += 1
        return float(loss.detach())

    def save(self) -> None:
        """Write the checkpoint atomically: an interruption leaves the old or the new file."""
        state = {
            "model": self.model.state_dict(),
            "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
            "step": self.step,
            "seconds": self.seconds,
        }
        with (self.folder / "checkpoint.new").open("wb") as file:
            torch.save(state, file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(self.folder / "checkpoint.new", self.folder / "checkpoint.pt")

    def _log(self) -> Path:
        """Return the log without the steps of an interrupted run after its last checkpoint."""
        path = self.folder / "log.jsonl"
        if path.exists():
            lines = [line for line in path.read_text(encoding="utf-8").splitlines() if line.endswith("}")]
            kept = [line for line in lines if json.loads(line)["step"] <= self.step]
            path.with_suffix(".new").write_text("".join(line + "\n" for line in kept), encoding="utf-8")
            os.replace(path.with_suffix(".new"), path)
        return path

    def _resume(self) -> None:
        path = self.folder / "checkpoint.pt"
        if not path.exists():
            return
        state = torch.load(path, map_location=self.device, weights_only=True)
        restore(self.model, state["model"], path)
        for optimizer, saved in zip(self.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        self.step, self.seconds = state["step"], state["seconds"]


def bars() -> Progress:
    """Return a progress display for a ``with`` block: task, progress, remaining time."""
    return Progress(TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
