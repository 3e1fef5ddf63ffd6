"""Tensor forms of the acceptance methods. Each returns the last accepted node and the next token, ``[B, 2]``.

The node is -1 where no node is accepted. Names follow the readable methods in ``acceptance/``.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from cospec.acceptance.tensor.batch import PADDING, TensorBatch
from cospec.acceptance.typical import DELTA, EPSILON

TensorForm = Callable[[TensorBatch], Tensor]
"""Verifies a batch; ``AcceptanceMethod.tensor_form`` names such a function."""


def match(batch: TensorBatch) -> Tensor:
    """Walk down while a child has the token that the target draws; children have larger indices than parents."""
    tokens = batch.target_tokens()
    end = torch.full_like(batch.first, -1)
    for node in range(batch.num_nodes):
        drawn = tokens[batch.rows_after(end)]
        accepted = (batch.parents[:, node] == end) & (batch.tokens[:, node] == drawn)
        end = torch.where(accepted, node, end)
    return torch.stack([end, tokens[batch.rows_after(end)]], -1)


def rejection(batch: TensorBatch) -> Tensor:
    """Accept the tokens before the first failed test."""
    target, drafted = batch.drafted_probs()
    accepted = (batch.uniforms() * drafted < target) & (batch.parents > PADDING)
    return _end_chain(batch, accepted.long().cumprod(1).sum(1), torch.ones_like(batch.probs[batch.first, 0]))


def block(batch: TensorBatch) -> Tensor:
    """Accept the longest prefix whose own test succeeds; ``weight`` is the paper's p_i."""
    target, drafted = batch.drafted_probs()
    uniforms = batch.uniforms()
    weight = torch.ones_like(batch.probs[batch.first, 0])
    kept, kept_weight = torch.zeros_like(batch.first), weight
    for length in range(1, batch.num_nodes + 1):
        node, inside = length - 1, batch.lengths >= length
        ratio = torch.where(inside, weight * target[:, node] / drafted[:, node], 0.0)
        weight = ratio.clamp(max=1.0)
        chance = weight
        if length < batch.num_nodes:
            rest = weight[:, None] * batch.probs[batch.rows_after(0 * kept + node)] - batch.q[:, length]
            mass = rest.clamp_(min=0.0).sum(-1)
            share = torch.where(mass > 0.0, mass / (mass + (1.0 - weight)), 0.0)
            chance = torch.where(batch.lengths == length, weight, share)
        accepted = inside & (uniforms[:, node] < chance)
        kept, kept_weight = torch.where(accepted, length, kept), torch.where(accepted, weight, kept_weight)
    return _end_chain(batch, kept, kept_weight)


def recursive(batch: TensorBatch) -> Tensor:
    """Test the children of each accepted node in order, each against what the tests before it left."""
    uniforms, (_, drafted) = batch.uniforms(), batch.drafted_probs()
    end, length = torch.full_like(batch.first, -1), torch.zeros_like(batch.first)
    rest, rejected = batch.probs[batch.rows_after(end)], length > 0
    for node in range(batch.num_nodes):
        tested = batch.parents[:, node] == end
        chance = rest.gather(-1, batch.tokens[:, node, None])[:, 0]
        accepted = tested & (uniforms[:, node] * drafted[:, node] < chance)
        left = _residual(rest, batch.q[:, node], torch.ones_like(chance))
        end, length = torch.where(accepted, node, end), length + accepted
        rest = torch.where((tested & ~accepted)[:, None], left / left.sum(-1, keepdim=True), rest)
        rest = torch.where(accepted[:, None], batch.probs[batch.rows_after(end)], rest)
        rejected = ~accepted & (rejected | tested)
    return torch.stack([end, batch.draw(rest, length, rejected)], -1)


def typical(batch: TensorBatch) -> Tensor:
    """Accept typical tokens whose ancestors were accepted; the deepest path wins, then the smaller index."""
    target, _ = batch.drafted_probs()
    entropy = torch.special.xlogy(batch.probs, batch.probs).sum(-1)
    thresholds = (DELTA * entropy.exp()).clamp(max=EPSILON)
    kept = target > thresholds[batch.rows_after(batch.parents.clamp(min=-1))]
    end, depth = torch.full_like(batch.first, -1), torch.zeros_like(batch.first)
    for node in range(batch.num_nodes):
        parent = batch.parents[:, node]
        above = (parent == -1) | ((parent >= 0) & kept.gather(1, parent.clamp(min=0)[:, None])[:, 0])
        kept[:, node] &= above
        deeper = kept[:, node] & (batch.depths[:, node] > depth)
        end, depth = torch.where(deeper, node, end), torch.where(deeper, batch.depths[:, node], depth)
    return torch.stack([end, batch.draw(batch.probs[batch.rows_after(end)], depth, depth < 0)], -1)


def _end_chain(batch: TensorBatch, lengths: Tensor, scale: Tensor) -> Tensor:
    """Draw the token after ``lengths [B]`` tokens: from the target after a whole chain, otherwise from the residual."""
    whole, own = lengths == batch.lengths, batch.probs[batch.rows_after(lengths - 1)]
    rejected = lengths.clamp(max=batch.num_nodes - 1)
    q = batch.q[torch.arange(len(lengths), device=lengths.device), rejected]
    weights = torch.where(whole[:, None], own, _residual(own, q, scale))
    return torch.stack([lengths - 1, batch.draw(weights, lengths, ~whole)], -1)


def _residual(probs: Tensor, q: Tensor, scale: Tensor) -> Tensor:
    """Return ``max(0, scale p - q)``, or ``probs`` where rounding leaves nothing, ``[B, V]``."""
    rest = (scale[:, None] * probs - q).clamp_(min=0.0)
    return torch.where(rest.sum(-1, keepdim=True) > 0.0, rest, probs)
