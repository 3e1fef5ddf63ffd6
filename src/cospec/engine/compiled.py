"""Rules as the native library has them: one call draws and judges for all sequences of a round.

What it decides is what ``cospec.rules`` decide by the laws of ``cospec.sampling``, see ``csrc/judge.cpp``. It looks at
a row only when the verdict depends on it, and the laws never leave it.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence as Seq
from ctypes import byref
from struct import Struct

import numpy as np
from torch import Tensor

from cospec import native
from cospec.engine.judging import Task
from cospec.native import Source
from cospec.protocols import Rule
from cospec.rules.block import Block
from cospec.rules.match import Match
from cospec.rules.rejection import Rejection
from cospec.sampling import edit
from cospec.types import Verdict

_RULES: dict[type, int] = {Match: 0, Rejection: 1, Block: 2}
_CASE = Struct("=6q3Q3dq")  # ``Case`` in ``csrc/judge.cpp``
_VERDICT = 4  # words
_WORD = 2**64


def reads(logits: Tensor, rules: Seq[Rule]) -> bool:
    """Whether the library can judge by these logits, and has all of these rules."""
    return native.reads(logits) and all(type(rule) in _RULES for rule in rules)


def judge(tasks: Seq[Task], rules: Seq[Rule], logits: Tensor) -> list[Verdict | None]:
    """See ``judging.judge``; ``logits [R, V]`` are float32 on the CPU."""
    return judge_by(tasks, rules, Source([_edited(tasks, logits)]))


def judge_by(tasks: Seq[Task], rules: Seq[Rule], source: Source) -> list[Verdict | None]:
    """See ``judging.judge``; of a blend only the rows that verdicts depend on are computed."""
    cases, kept = bytearray(), []  # the latter is what cases point to
    tokens, parents = array("q"), array("q")
    for task, rule in zip(tasks, rules, strict=True):
        sequence, draft = task.entry.sequence, task.draft
        request, place, nodes, q = sequence.request, len(tokens), 0, 0
        if draft is not None:
            nodes = len(draft.tokens)
            tokens.extend(draft.tokens)
            parents.extend(draft.parents)
            if draft.q is not None:
                kept.append(np.ascontiguousarray(draft.q, dtype=np.float64))
                q = kept[-1].ctypes.data
        params, row = request.sampling, task.last - task.count
        temperature = 0.0 if params.greedy else params.temperature
        cases += _CASE.pack(
            task.first, row, task.count, _RULES[type(rule)], place, nodes, q, request.seed % _WORD,
            len(sequence.tokens), temperature, params.top_p, params.min_p, params.top_k,
        )  # fmt: skip
    path, found = array("q", bytes(8 * len(tokens))), array("q", bytes(8 * _VERDICT * len(tasks)))
    native.library().cospec_judge(
        byref(source), bytes(cases), len(tasks), tokens.buffer_info()[0], parents.buffer_info()[0],
        path.buffer_info()[0], found.buffer_info()[0],
    )  # fmt: skip
    verdicts: list[Verdict | None] = []
    place = 0
    for number, task in enumerate(tasks):
        length, token, bonus, broken = found[_VERDICT * number : _VERDICT * (number + 1)]
        accepted = tuple(path[place : place + length])
        verdicts.append(None if broken else Verdict(accepted, None if token < 0 else token, bonus == 1))
        place += len(task.draft.tokens) if task.draft is not None else 0
    return verdicts


def _edited(tasks: Seq[Task], logits: Tensor) -> Tensor:
    """The logits with what requests change about them; the given tensor is left as it was."""
    editing = [task for task in tasks if task.count and task.entry.sequence.request.sampling.edits_logits]
    if editing:
        logits = logits.clone()
    for task in editing:
        block = task.block
        logits[task.judged] = edit(logits[task.judged], block.params, block.history)
    return logits
