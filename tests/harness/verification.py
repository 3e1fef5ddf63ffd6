"""Random drafts near their target distributions, for comparisons of two implementations of verification."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from hypothesis import strategies as st

from cospec.acceptance.python_verification import VerifyTask
from cospec.core.plugin_base import AcceptanceMethod
from cospec.core.types import Draft, DraftBudget, RequestState, ScheduledRequest
from cospec.registry import ACCEPTANCE_METHODS
from cospec.sampling_params import SamplingParams
from harness.toys import make_request


@dataclass
class Round:
    """Tasks of many sequences under construction, and the logits that they are judged by."""

    vocab: int
    generator: np.random.Generator

    def __post_init__(self) -> None:
        self.tasks: list[VerifyTask] = []
        self.acceptance_methods: list[AcceptanceMethod] = []
        self.logits: list[np.ndarray] = []

    def add(
        self, params: SamplingParams, acceptance_method: str, nodes: int, agreeing: float, drawn: bool, tree: bool
    ) -> None:
        """One sequence with a draft near the target distribution: ``agreeing`` 0 is far, 1 equal."""
        rng, number, tree = self.generator, len(self.tasks), tree and ACCEPTANCE_METHODS.load(acceptance_method).trees
        prompt = rng.integers(0, self.vocab, 5).tolist()
        sequence = RequestState(make_request(f"s{number}", prompt, params), prompt, computed=4)
        rows = rng.normal(size=(nodes + 1, self.vocab)).astype(np.float32) * 3
        temperature = params.temperature or 1.0
        mixed = rows[:-1].astype(np.float64) * agreeing + rng.normal(size=(nodes, self.vocab)) * 3 * (1 - agreeing)
        weights = np.exp((mixed - mixed.max(-1, keepdims=True)) / temperature)
        q = weights / weights.sum(-1, keepdims=True)
        chosen = [int(rng.choice(self.vocab, p=row)) if drawn else int(row.argmax()) for row in q]
        parents = [int(rng.integers(-1, node)) if tree else node - 1 for node in range(nodes)]
        draft = Draft(sequence.id, 5, tuple(chosen), tuple(parents), ("d",) * nodes, q if drawn and not tree else None)
        last = self.tasks[-1].last if self.tasks else 0
        known = int(rng.integers(0, 2))
        self.logits += [rng.normal(size=(known, self.vocab)).astype(np.float32), rows]
        entry = ScheduledRequest(sequence, 1, DraftBudget(nodes, nodes))
        task = VerifyTask(entry, draft if nodes else None, last, last + known + nodes + 1, nodes + 1)
        self.tasks.append(task)
        self.acceptance_methods.append(ACCEPTANCE_METHODS.load(acceptance_method)())

    @property
    def rows(self) -> torch.Tensor:
        return torch.from_numpy(np.concatenate(self.logits))

    def acceptance_method(self, sequence: RequestState) -> AcceptanceMethod:
        """Of a task's sequence."""
        return next(
            acceptance_method
            for task, acceptance_method in zip(self.tasks, self.acceptance_methods, strict=True)
            if task.entry.sequence is sequence
        )


@st.composite
def parameters(draw: st.DrawFn) -> SamplingParams:
    return SamplingParams(
        temperature=draw(st.sampled_from([0.0, 0.3, 0.8, 1.0, 2.5])),
        top_k=draw(st.sampled_from([0, 0, 1, 3, 40])),
        top_p=draw(st.sampled_from([1.0, 1.0, 0.9, 0.4])),
        min_p=draw(st.sampled_from([0.0, 0.0, 0.1])),
        presence_penalty=draw(st.sampled_from([0.0, 0.0, 0.7])),
        logit_bias=draw(st.sampled_from([None, None, {1: 2.5}])),
        min_tokens=draw(st.sampled_from([0, 0, 2])),
        stop_token_ids=draw(st.sampled_from([(), (0, 3)])),
        allowed_token_ids=draw(st.sampled_from([None, None, (0, 1, 2, 4)])),
        bad_words_token_ids=draw(st.sampled_from([(), (), ((1,), (2, 4), (4, 2))])),
        max_tokens=9,
        seed=draw(st.integers(0, 2**64 - 1)),
    )


CASE = st.tuples(st.integers(0, 6), st.sampled_from([0.0, 0.9, 1.0]), st.booleans(), st.booleans())
"""Nodes, agreement, whether tokens are drawn, whether the draft is a tree."""
