"""The log-probabilities that responses have, read from the rows of logits of a verified task."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from cospec.acceptance.python_verification import VerifyTask
from cospec.core.stats import TokenLogprobs
from cospec.core.types import RequestState, VerifyResult


def wants_prompt_rows(sequence: RequestState) -> bool:
    """Return whether the step computes rows of logits that the prompt's log-probabilities are read from."""
    return sequence.request.sampling.prompt_logprobs is not None and sequence.computed < sequence.prompt_len - 1


def prompt_logprobs(task: VerifyTask, logits: Tensor) -> tuple[TokenLogprobs, ...]:
    """Return log-probabilities of the prompt tokens after the positions that this step computes."""
    sequence = task.entry.sequence
    offset = sequence.computed + 1  # the position that the first row predicts
    first = max(offset, len(sequence.prompt_logprobs) + 1)
    end = min(sequence.computed + task.entry.num_tokens, sequence.prompt_len - 1) + 1
    if end <= first:
        return ()
    rows = logits[task.first + first - offset : task.first + end - offset]
    return row_logprobs(rows, sequence.tokens[first:end], sequence.request.sampling.prompt_logprobs or 0)


def token_logprobs(task: VerifyTask, result: VerifyResult, logits: Tensor, top: int) -> tuple[TokenLogprobs, ...]:
    """Return log-probabilities of the accepted tokens and of the next token.

    Args:
        logits: ``[R, V]``, rows of the step.
        top: number of likeliest tokens of each position.
    """
    tokens = [task.draft.tokens[node] for node in result.path] if task.draft else []
    tokens += [] if result.token is None else [result.token]
    if not tokens:
        return ()
    first = task.verified_rows.start
    rows = [first, *(first + 1 + node for node in result.path)][: len(tokens)]
    return row_logprobs(torch.stack([logits[row] for row in rows]), tokens, top)  # an index would start torch's threads


def row_logprobs(logits: Tensor, tokens: Sequence[int], top: int) -> tuple[TokenLogprobs, ...]:
    """Return log-probabilities of tokens before any processor.

    Args:
        logits: ``[R, V]``, one row per token.
        tokens: ``[R]``.
        top: number of likeliest tokens of each position.
    """
    values = torch.log_softmax(logits.double(), -1)
    own = values.gather(-1, torch.tensor(tokens, device=values.device)[:, None])
    ranks = (values > own).sum(-1) + 1
    best = values.topk(min(top, values.shape[-1]), -1) if top else None
    rows = []
    for row, token in enumerate(tokens):
        pairs = zip(best.indices[row].tolist(), best.values[row].tolist(), strict=True) if best else ()
        rows.append(TokenLogprobs(token, float(own[row]), int(ranks[row]), tuple(pairs)))
    return tuple(rows)
