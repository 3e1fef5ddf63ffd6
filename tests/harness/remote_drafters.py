"""Drafters for processes of their own: built by name, well and badly behaved.

A process imports this module, so torch is imported only where a drafter needs torch.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from cospec.core.plugin_base import Drafter
from cospec.core.types import Commit, Draft, DraftBudget, DraftContext
from cospec.drafters.ngram import NgramDrafter
from cospec.errors import ModelError

if TYPE_CHECKING:
    from cospec.runtime.drafter_process_executor import Build
    from cospec.runtime.executor_base import DrafterRecipe

VOCAB = 6
SLEEP_SECONDS = 1.0
TCP_MAIN = """
import socket, sys
from cospec.runtime.drafter_worker import run
run(socket.create_connection(("127.0.0.1", int(sys.argv[1]))), sys.argv[2])
"""


class Doomed(NgramDrafter):
    """Drafts some times, then ``end`` happens."""

    def __init__(self, times: int, end: str) -> None:
        super().__init__(1, 3)
        self._left, self._end = times, end

    def propose(self, contexts: Sequence[DraftContext], budgets: Sequence[DraftBudget]) -> list[Draft]:
        self._left -= 1
        if self._left < 0 and self._end == "raise":
            raise ZeroDivisionError
        if self._left < 0:
            os.kill(os.getpid(), signal.SIGSTOP if self._end == "hang" else signal.SIGKILL)
        return super().propose(contexts, budgets)


class Sluggish(NgramDrafter):
    """Sleeps before drafts of requests whose id begins with ``slow``."""

    def propose(self, contexts: Sequence[DraftContext], budgets: Sequence[DraftBudget]) -> list[Draft]:
        if any(context.id.startswith("slow") for context in contexts):
            time.sleep(SLEEP_SECONDS)
        return super().propose(contexts, budgets)


class Recording(Drafter):
    """Drafts the tokens that it is given, and writes each call into a file; some ids make it sleep or raise."""

    name, samples, drafts_ahead, reads_hidden_states, learns = "recording", False, True, False, False

    def __init__(self, log: Path) -> None:
        self._log = log

    def propose(self, contexts: Sequence[DraftContext], budgets: Sequence[DraftBudget]) -> list[Draft]:
        for one in contexts:
            self._write(f"propose {one.id}")
            if one.id == "raise":
                raise ZeroDivisionError
            if one.id == "sleep":
                time.sleep(SLEEP_SECONDS)
        return [self._draft(one.id, tuple(one.tokens)) for one in contexts]

    def commit(self, commits: Sequence[Commit]) -> None:
        self._write("commit")

    def free(self, ids: Sequence[str]) -> None:
        if "unknown" not in ids:
            self._write(f"free {' '.join(ids)}")

    def _draft(self, id: str, tokens: tuple[int, ...]) -> Draft:
        return Draft(id, len(tokens), tokens, tuple(range(-1, len(tokens) - 1)), (self.name,) * len(tokens))

    def _write(self, line: str) -> None:
        with self._log.open("a", encoding="utf-8") as file:
            file.write(line + "\n")


class TcpWorker:
    """A ``Worker`` that is reached over TCP, as on another machine."""

    def __init__(self, name: str) -> None:
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
        with socket.create_server(("127.0.0.1", 0)) as listener:
            command = [sys.executable, "-P", "-c", TCP_MAIN, str(listener.getsockname()[1]), name]
            self._process = subprocess.Popen(command, env=environment)
            self.stream, _ = listener.accept()

    @property
    def pid(self) -> int:
        return self._process.pid

    def kill(self) -> None:
        self._process.kill()

    def ending(self) -> str:
        return f"has ended with exit code {self._process.wait()}"

    def close(self) -> None:
        self.stream.close()
        self._process.kill()
        self._process.wait()


LOOKUPS: dict[str, type[NgramDrafter]] = {"ngram": NgramDrafter, "sluggish": Sluggish}


def recipe_of(build: Build) -> DrafterRecipe:
    """What an executor gets to know of a drafter without a configuration."""
    import torch

    from cospec.runtime.executor_base import DrafterRecipe

    return DrafterRecipe("toy", "draft_model", {}, build, build, torch.device("cpu"))


def toy(name: str) -> Build:
    """What makes a drafter of that name."""
    return partial(_toy, name)


def llama(folder: Path) -> Build:
    """What makes a model drafter of a folder's weights."""
    return partial(_llama, str(folder))


def doomed(times: int, end: str) -> Build:
    """What makes a drafter that drafts some times."""
    return partial(Doomed, times, end)


def refusing() -> Drafter:
    """Cannot be built."""
    raise ModelError("The drafter has no weights.")


def _llama(folder: str) -> Drafter:
    from cospec.drafters.model import ModelDrafter
    from harness.llamas import load

    return ModelDrafter(load(Path(folder)))


def _toy(name: str) -> Drafter:
    if name in LOOKUPS:
        return LOOKUPS[name](1, 3)
    from cospec.drafters.model import ModelDrafter
    from cospec.models.toy import ToyModel
    from harness.pools import pool_of, toy_drafters

    if name == "pool":
        return pool_of(toy_drafters(VOCAB), "fuse", "hedge", VOCAB)
    itself = ToyModel(VOCAB, order=2, seed=1, sharpness=2.0)
    return ModelDrafter(itself if name == "itself" else ToyModel(VOCAB, order=1, seed=3))
