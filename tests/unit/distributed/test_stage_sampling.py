"""Tokens that the last stage draws give the outputs that the engine decides from logits."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import msgspec
import numpy as np
import pytest
import torch
from torch import Tensor

from cospec.acceptance.python_verification import NOT_FINITE
from cospec.assembly.components import AcceptanceMethods
from cospec.core.model_io import BatchOutput, SequenceSlice, TokenBatch
from cospec.core.submitted_step import FinishedFuture
from cospec.core.types import Draft, DraftBudget, Request, RequestState, ScheduledRequest, SpeculationParams, StepOutput
from cospec.core.verifier import TargetVerifier
from cospec.distributed.messages import Window
from cospec.distributed.pipeline_parallel_verifier import PipelineParallelVerifier
from cospec.distributed.stage_sampling import draws_of, window_output
from cospec.ensemble.blends.weighted import Single
from cospec.models.stage import StageBatch
from cospec.models.toy import ToyModel
from cospec.sampling_params import SamplingParams

VOCAB, PROMPT = 300, 5
SOME_TREE = (-1, -1, 0, 1, 1, 4)
PARAMS = [
    SamplingParams(temperature=0),
    SamplingParams(temperature=0.8),
    SamplingParams(temperature=0.8, top_k=3),
    SamplingParams(temperature=1.3, top_p=0.9, min_p=0.02, top_k=-1),
    SamplingParams(temperature=0, logprobs=2),
    SamplingParams(temperature=0.8, repetition_penalty=1.3),
    SamplingParams(temperature=0, prompt_logprobs=1),
]
MOST_ROWS = len(PARAMS) * (PROMPT + 1 + len(SOME_TREE))
Change = Callable[[SequenceSlice], SequenceSlice]


class FixedLogits(ToyModel):
    """A model with given logits, which computes batches as the last stage does."""

    max_in_flight = 1

    def __init__(self, logits: Tensor, change: Change = lambda part: part) -> None:
        super().__init__(VOCAB, order=1)
        self._logits, self._change = logits, change
        self.outputs: list[BatchOutput] = []

    def forward(self, batch: TokenBatch) -> Tensor:
        return self._logits[: sum(len(part.tokens) - part.logits_from for part in batch.slices)].clone()

    def submit(self, batch: TokenBatch) -> FinishedFuture[BatchOutput]:
        logits = self.forward(batch)
        batch = TokenBatch(tuple(self._change(part) for part in batch.slices))
        none = np.zeros(0, np.int64), np.zeros(0, np.int64)
        window = Window.of(7, StageBatch.of(batch, lambda id: [0]), none, draws_of(batch))
        found = window_output(msgspec.structs.replace(window, states=logits.numpy()))
        given = torch.empty(0, 0) if found.logits is None else torch.from_numpy(found.logits)
        self.outputs.append(BatchOutput(given, () if found.tokens is None else found.tokens.tolist()))
        assert found.number == 7
        return FinishedFuture(self.outputs[-1])


def entry(number: int, params: SamplingParams, method: str = "match") -> ScheduledRequest:
    request = Request(
        f"r{number}",
        tuple(range(PROMPT)),
        params,
        2**63 + number,
        speculation=SpeculationParams(acceptance_method=method),
    )
    return ScheduledRequest(RequestState(request, list(range(PROMPT))), PROMPT, DraftBudget())


def draft(entry: ScheduledRequest, tokens: Sequence[int], parents: Sequence[int]) -> Draft:
    return Draft(entry.sequence.id, PROMPT, tuple(tokens), tuple(parents), ("d",) * len(tokens))


def outputs(
    model: FixedLogits, entries: Sequence[ScheduledRequest], drafts: Mapping[str, Draft]
) -> tuple[list[StepOutput], list[StepOutput]]:
    """What the engine decides from logits, and what follows from tokens of the last stage."""
    verifier = TargetVerifier(model, Single(), AcceptanceMethods())
    return (
        verifier.submit(entries, drafts).result(),
        PipelineParallelVerifier(model, verifier).submit(entries, drafts).result(),
    )


def likely_logits(seed: int) -> Tensor:
    """Most of the mass is on four tokens, so that drafts of these tokens are often right."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(MOST_ROWS, VOCAB, generator=generator)
    logits[:, :4] += 5
    return logits


def drafts_of(entries: Sequence[ScheduledRequest], seed: int) -> dict[str, Draft]:
    """A tree for each request but the third."""
    chance = np.random.default_rng(seed)
    return {
        each.sequence.id: draft(each, chance.integers(0, 4, len(SOME_TREE)).tolist(), SOME_TREE)
        for number, each in enumerate(entries)
        if number != 2
    }


def test_outputs_are_those_by_logits() -> None:
    entries, accepted = [entry(number, params) for number, params in enumerate(PARAMS)], 0
    for seed in range(30):
        model, drafts = FixedLogits(likely_logits(seed)), drafts_of(entries, seed)
        wanted, found = outputs(model, entries, drafts)
        assert found == wanted
        accepted += sum(len(each.result.path) for each in found[:4] if each.result)
        (output,) = model.outputs
        assert len(output.tokens) == 3 * 7 + 1  # three trees, and one request without a draft
        assert len(output.logits) == 7 + 7 + PROMPT + len(SOME_TREE)
    assert accepted > 30


def test_another_seed_is_seen() -> None:
    """The control: the stage draws with the seed of another request."""

    def other(part: SequenceSlice) -> SequenceSlice:
        return part if part.sampling is None else replace(part, sampling=replace(part.sampling, seed=1))

    entries = [entry(number, params) for number, params in enumerate(PARAMS)]
    differ = [0] * len(PARAMS)
    for seed in range(10):
        wanted, found = outputs(FixedLogits(likely_logits(seed), other), entries, drafts_of(entries, seed))
        for number, (one, two) in enumerate(zip(wanted, found, strict=True)):
            differ[number] += one != two
    assert [count > 0 for count in differ] == [False, True, True, True, False, False, False]


@pytest.mark.parametrize(
    ("method", "drafted", "by_token"), [("match", True, 3), ("rejection", True, 0), ("rejection", False, 1)]
)
def test_methods_that_read_probabilities_get_logits(method: str, drafted: bool, by_token: int) -> None:
    own = entry(0, PARAMS[1], method)
    model = FixedLogits(likely_logits(0))
    wanted, found = outputs(model, [own], {"r0": draft(own, (0, 1), (-1, 0))} if drafted else {})
    assert found == wanted
    (output,) = model.outputs
    assert (len(output.tokens), len(output.logits)) == (by_token, 0 if by_token else 3)


@pytest.mark.parametrize("params", PARAMS[:4])
def test_rows_that_are_not_finite_end_the_request_that_reads_them(params: SamplingParams) -> None:
    for row in range(3):
        logits = torch.zeros(MOST_ROWS, VOCAB)
        logits[0, 9] = 1e4  # the drafted token is certain
        logits[row] = float("nan")
        broken, other = entry(0, params), entry(1, params)
        wanted, found = outputs(FixedLogits(logits), [broken, other], {"r0": draft(broken, (9, 8), (-1, -1))})
        assert found == wanted
        assert [each.error for each in found] == [NOT_FINITE if row < 2 else None, None]


def test_prompts_computed_in_pieces_need_no_rows() -> None:
    own, whole = entry(0, PARAMS[0]), entry(1, PARAMS[0])
    piece = ScheduledRequest(own.sequence, 2, DraftBudget())
    wanted, found = outputs(FixedLogits(likely_logits(1)), [piece, whole], {})
    assert found == wanted and found[0].result is None and found[1].result is not None
