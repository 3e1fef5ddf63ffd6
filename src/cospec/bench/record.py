"""Record what drafters, or models of an ensemble, propose along greedy outputs, for ``cospec simulate``."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch

from cospec.core.interfaces import Model
from cospec.core.types import Commit, Draft, DraftBudget, DraftContext
from cospec.drafters.known_token_scores import token_probabilities
from cospec.drafters.model import ModelDrafter
from cospec.drafters.pool.candidates import top_candidates
from cospec.ensemble.key_token_calibration import score
from cospec.rng.random_streams import StreamKind
from cospec.sampling_params import SamplingParams
from cospec.simulation.recorded_drafts import Floats, Ints, RecordedRequest, Recording, requests_of

GREEDY = SamplingParams(temperature=0.0)
Written = tuple[str, Sequence[int], Sequence[int]]  # domain, prompt and greedy output of one request


def record(
    drafters: Mapping[str, Model],
    written: Sequence[Written],
    vocab_size: int,
    depth: int,
    done: Callable[[], object] = lambda: None,
) -> Recording:
    """Return the drafts of every drafter at every position of every output.

    Args:
        drafters: models with the target's vocabulary, by name.
        depth: tokens of a chain. Chains near the end of the last output repeat their last token.
        done: called after each drafter.
    """
    lengths = [(len(prompt), len(output)) for _, prompt, output in written]
    text = [token for _, prompt, output in written for token in (*prompt, *output)]
    requests = requests_of([domain for domain, _, _ in written], lengths, text)
    positions, count = sum(len(each.output) for each in requests), len(drafters)
    tokens, confidence = np.zeros((count, positions, depth), np.int64), np.zeros((count, positions, depth))
    second, second_confidence = np.zeros((count, positions), np.int64), np.zeros((count, positions))
    known = np.zeros((count, len(text)))
    for number, model in enumerate(drafters.values()):
        _record_chains(model, requests, tokens[number], confidence[number])
        for request in requests:
            _record_rows(model, request, second[number], second_confidence[number], known[number])
        done()
    return Recording(tuple(drafters), vocab_size, requests, tokens, confidence, second, second_confidence, known)


def _record_chains(model: Model, requests: Sequence[RecordedRequest], tokens: Ints, confidence: Floats) -> None:
    """Fill in the chains ``[P, K]`` of one drafter; all requests go forward together."""
    drafter, depth = ModelDrafter(model), tokens.shape[1]
    ids = [str(number) for number in range(len(requests))]
    for place in range(max(len(request.output) for request in requests)):
        current = [(id, each) for id, each in zip(ids, requests, strict=True) if place < len(each.output)]
        contexts = [_context(id, each, place) for id, each in current]
        budgets = [DraftBudget(depth, depth, confident=True)] * len(contexts)
        drafts = {draft.id: draft for draft in drafter.propose(contexts, budgets)}
        for id, request in current:
            _fill(drafts[id], tokens[request.first + place], confidence[request.first + place])
        drafter.commit([_committed(drafts[id], request.output[place]) for id, request in current])
    drafter.free(ids)


def _context(id: str, request: RecordedRequest, place: int) -> DraftContext:
    prompt = request.prompt
    return DraftContext(id, [*prompt, *request.output[:place]], len(prompt), GREEDY, 0, StreamKind.TARGET)


def _fill(draft: Draft, tokens: Ints, confidence: Floats) -> None:
    assert draft.confidence is not None, "the budget asks for confidences"
    missing = len(tokens) - len(draft)
    tokens[:] = np.pad(draft.tokens, (0, missing), mode="edge")
    confidence[:] = np.pad(draft.confidence, (0, missing))


def _committed(draft: Draft, token: int) -> Commit:
    path = (0,) if draft.tokens[0] == token else ()
    return Commit(draft.id, draft.base_len, (token,), path, draft.base_len)


def _record_rows(
    model: Model, request: RecordedRequest, second: Ints, second_confidence: Floats, known: Floats
) -> None:
    """Fill in one request's second choices and the probabilities of its tokens, from one forward."""
    text = (*request.prompt, *request.output)
    logits = score(model, text, 1)
    known[request.start + 1 : request.start + len(text)] = token_probabilities(logits, text[1:])
    rows = torch.as_tensor(logits[len(request.prompt) - 1 :])
    context = _context("rows", request, 0)
    for place, found in enumerate(top_candidates(rows, [context] * len(rows), [()] * len(rows))):
        if found is not None and found.second is not None:
            second[request.first + place], second_confidence[request.first + place] = found.second
