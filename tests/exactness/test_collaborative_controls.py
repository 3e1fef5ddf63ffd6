"""Mistakes in collaborative decoding that the checks must see, and the calls that it should take."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from torch import Tensor

from cospec.acceptance.python_verification import VerifyTask
from cospec.acceptance.rejection import Rejection
from cospec.core.interfaces import Blend
from cospec.core.types import Draft, Request, RequestState, SpeculationParams, StepOutput, TargetProbs, VerifyResult
from cospec.ensemble.blends.weighted import Single
from cospec.ensemble.ensemble import EnsembleDecoder
from cospec.ensemble.proposed_tokens import Proposal, ProposalChain
from cospec.ensemble.proposer import Proposer, draw_proposals
from cospec.ensemble.speedup_model import ProposalProcess
from cospec.models.toy import ToyModel
from cospec.rng.random_streams import RandomStreams, StreamKind
from cospec.sampling_params import SamplingParams
from harness.ensembles import Blended, adaptive, ensemble_engine, toys, weighted
from harness.enumerated_draws import total_variation
from harness.reference import joint_distribution_of
from harness.toys import enumerated_distribution, make_request, run_all, with_pool

SEEN = 1e-3
EXACT = 1e-12
PARAMS = SamplingParams(max_tokens=5)
LAW = {"method": "weighted", "weights": [0.6, 0.4]}


def error(count: int = 2) -> float:
    """Total variation of four tokens."""
    ensemble = LAW if count == 2 else {"method": "weighted"}
    models = toys(count, 2)
    engine = ensemble_engine(models, ensemble, "alternate", [2, 1, 1][:count], acceptance_method="rejection")
    if count == 2:
        wanted = joint_distribution_of(Blended(models, weighted(0.6, 0.4)), PARAMS, (0, 1), 4)
    else:
        wanted = joint_distribution_of(Blended(models, weighted(*[1 / 3] * 3)), PARAMS, (0, 1), 4)
    return total_variation(enumerated_distribution(engine, (0, 1), PARAMS, 4), wanted)


def test_a_committed_bonus_is_seen() -> None:
    """What the scorer draws after an accepted proposal follows the scorer alone."""
    assert error() < EXACT
    plain = Rejection.verify

    def verify(self: Rejection, draft: Draft, target: TargetProbs, draws: RandomStreams) -> VerifyResult:
        if draft.drafters == ("m1",):
            return VerifyResult((0,), None, bonus=True)
        return plain(self, draft, target, draws)

    with patch.object(Rejection, "verify", verify):
        assert error() > SEEN


RELAXED = {"method": "adaptive", "max_divergence": 0.1, "lambda1": 9.0, "lambda2": 1.0, "lambda3": 0.0}


def relaxed_error(bound: float = 0.1) -> float:
    """Total variation of four tokens under a relaxed target from the distribution with this bound."""
    models = toys(2, 2)
    engine = ensemble_engine(models, RELAXED, "naive", 2, acceptance_method="rejection", proposer=1)
    wanted = joint_distribution_of(Blended(models, adaptive(bound, 9.0, 1.0, 0.0)), PARAMS, (0, 1), 4)
    return total_variation(enumerated_distribution(engine, (0, 1), PARAMS, 4), wanted)


def test_another_bound_of_a_relaxed_target_is_seen() -> None:
    assert relaxed_error() < EXACT
    assert relaxed_error(0.05) > SEEN


def test_a_rejected_token_from_the_relaxed_target_itself_is_seen() -> None:
    """Like DSD's algorithm 1, line 16: the replacement has to come from the residual."""

    with patch("cospec.acceptance.rejection.residual", lambda probs, draft, node: probs):
        assert relaxed_error() > SEEN


def test_a_bonus_of_the_target_alone_is_seen() -> None:
    """After a draft that was accepted as a whole, like DSD's algorithm 1, line 19."""
    plain = EnsembleDecoder.verify

    def verify(
        self: EnsembleDecoder, blend: Blend, tasks: Sequence[VerifyTask], member_logits: Sequence[Tensor]
    ) -> list[StepOutput]:
        (task,) = tasks
        if task.draft is None and task.entry.sequence.output_len:
            return plain(self, Single(), tasks, member_logits[:1])
        return plain(self, blend, tasks, member_logits)

    with patch.object(EnsembleDecoder, "verify", verify):
        assert relaxed_error() > SEEN


def test_the_q_of_the_wrong_author_is_seen() -> None:
    def others(
        proposer: Proposer, logits: Tensor, lines: Sequence[tuple[RequestState, ProposalChain, StreamKind]]
    ) -> list[Proposal | None]:
        """The proposer's draw, with the other model's distribution as its q."""
        other = toys(2, 2)[1 - proposer.model]
        found: list[Proposal | None] = []
        for proposal, (sequence, line, _) in zip(draw_proposals(proposer, logits, lines), lines, strict=True):
            assert proposal is not None
            text = [*sequence.tokens, *(ahead.token for ahead in line.pending)]
            found.append(replace(proposal, q=torch.softmax(other.logits(text), -1).numpy()))
        return found

    with patch("cospec.ensemble.collaborative.draw_proposals", others):
        assert error() > SEEN


def test_a_cache_that_is_not_cut_back_is_seen() -> None:
    """Believing that a rejected token was the one that took its place."""
    feed = ToyModel.write

    def stale(self: ToyModel, id: str, place: int, token: int) -> None:
        seen = self.__dict__.setdefault("seen", set())
        if (id, place) not in seen:
            seen.add((id, place))
            feed(self, id, place, token)

    with patch.object(ToyModel, "write", stale):
        assert error() > SEEN


def sixteen_requests() -> list[Request]:
    """Requests with seeds of their own."""
    params = SamplingParams(max_tokens=40)
    chosen = SpeculationParams(acceptance_method="rejection")
    listed = [make_request(f"r{n}", (n % 3, 1), params, speculation=chosen) for n in range(16)]
    return [replace(request, seed=n) for n, request in enumerate(listed)]


def calls(ensemble: Mapping[str, object], gammas: list[int], sixteen: bool) -> list[dict[str, int]]:
    """Of sixteen requests, together or one by one."""
    listed, found = sixteen_requests(), list[dict[str, int]]()
    for group in [listed] if sixteen else [[request] for request in listed]:
        events = run_all(ensemble_engine(toys(2, 4), ensemble, gamma=gammas), group)
        found += [own[-1].stats.model_calls for own in events.values() if own[-1].stats]
    return found


def test_a_line_cleared_by_anothers_rejection_is_seen(caplog: pytest.LogCaptureFixture) -> None:
    """No request's calls depend on its batch; entries cleared in the middle of a turn are missed there."""
    assert calls(LAW, [2, 2], True) == calls(LAW, [2, 2], False)
    overall: list[ProposalChain] = []
    begin, cut = ProposalChain.__init__, ProposalChain.replace

    def remembered(self: ProposalChain, *args: Any, **kwargs: Any) -> None:
        begin(self, *args, **kwargs)
        overall.append(self)

    def all_cut(self: ProposalChain) -> None:
        cut(self)
        for line in overall:
            line.fed = [min(fed, line.frontier - 1) for fed in line.fed]
            line.rows = [None] * len(line.rows)
            line.pending.clear()

    with patch.object(ProposalChain, "__init__", remembered), patch.object(ProposalChain, "replace", all_cut):
        engine = ensemble_engine(toys(2, 4), LAW, gamma=[2, 2])
        for request in sixteen_requests():
            engine.add(request)
        while not caplog.records:  # a proposer finds its own logits gone, so a step fails
            engine.step()
    failed = caplog.records[0].exc_info
    assert failed is not None and failed[0] is AssertionError


@pytest.mark.parametrize("proposal", ["naive", "alternate"])
@pytest.mark.parametrize(("count", "gammas"), [(2, (1, 1)), (2, (3, 2)), (3, (2, 1, 2))])
def test_calls_are_as_many_as_the_theory_says(count: int, gammas: tuple[int, ...], proposal: str) -> None:
    """Models without memory, so that tokens are accepted independently of one another; within 2%."""
    models = [with_pool(ToyModel(5, order=0, seed=n, sharpness=0.8), 4096) for n in range(1, count + 1)]
    weights = [0.5, 0.3, 0.2] if count == 3 else [0.6, 0.4]
    own = [torch.softmax(model.logits(()), -1).numpy() for model in models]
    blend = sum(weight * p for weight, p in zip(weights, own, strict=True))
    alphas = tuple(float(np.minimum(p, blend).sum()) for p in own)
    ensemble = {"method": "weighted", "weights": weights}
    params = SamplingParams(max_tokens=400)
    chosen = SpeculationParams(acceptance_method="rejection")
    listed = [replace(make_request(f"r{n}", (0,), params, speculation=chosen), seed=n) for n in range(16)]
    engine = ensemble_engine(models, ensemble, proposal, list(gammas), max_num_batched_tokens=4096)
    events = run_all(engine, listed, check=False)
    expected = ProposalProcess(alphas, gammas, alternate=proposal == "alternate").calls_per_token()
    for place, wanted in enumerate(expected):
        made = sum(own[-1].stats.model_calls[f"m{place}"] - 1 for own in events.values() if own[-1].stats)
        assert made / (16 * 399) == pytest.approx(wanted, rel=0.02), (place, alphas)


@pytest.mark.parametrize("gamma", [1, 3])
def test_a_relaxed_target_takes_the_calls_of_the_theory(gamma: int) -> None:
    """With a bonus token after each draft that was accepted as a whole; without it the calls would be others."""
    models = [with_pool(ToyModel(5, order=0, seed=n, sharpness=0.8), 4096) for n in (1, 2)]
    target, q = (torch.softmax(model.logits(()), -1).tolist() for model in models)
    alpha = sum(map(min, adaptive(0.1, 9.0, 1.0, 0.0)([target, q]), q))
    chosen = SpeculationParams(acceptance_method="rejection")
    listed = [make_request(f"r{n}", (0,), SamplingParams(max_tokens=400), speculation=chosen) for n in range(16)]
    engine = ensemble_engine(models, RELAXED, "naive", gamma, proposer=1, max_num_batched_tokens=4096)
    events = run_all(engine, [replace(request, seed=n) for n, request in enumerate(listed)], check=False)
    process = ProposalProcess((1.0, alpha), (gamma, gamma), 1, False, (0, 1), relaxed=True)
    for place, wanted in enumerate(process.calls_per_token()):
        made = sum(own[-1].stats.model_calls[f"m{place}"] - 1 for own in events.values() if own[-1].stats)
        assert made / (16 * 399) == pytest.approx(wanted, rel=0.02), place
    assert replace(process, relaxed=False).calls_per_token()[0] > 1.05 * process.calls_per_token()[0]
