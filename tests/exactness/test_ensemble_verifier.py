"""A drafter that is no member: trees, steps and requests with other ensembles keep the blend's distribution."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest

from cospec.core.engine import Engine
from cospec.core.plugin_base import Drafter
from cospec.core.types import Commit, Request
from cospec.drafters.model import ModelDrafter
from cospec.ensemble.verifier import EnsembleVerifier
from cospec.models.toy import ToyModel
from cospec.sampling_params import SamplingParams
from harness.ensembles import Blended, Mix, contrastive, ensemble_engine, toys, weighted
from harness.enumerated_draws import total_variation
from harness.reference import joint_distribution_of
from harness.toys import ScriptedDrafter, enumerated_distribution, make_request, run_all, tokens_of, with_pool

EXACT, SEEN = 1e-12, 1e-3
PROMPT = (0, 1, 0)
PLAIN = SamplingParams(max_tokens=8)
MIXED = SamplingParams(
    max_tokens=8, temperature=0.8, top_p=0.95, repetition_penalty=1.3, logit_bias={1: 0.5}, stop_token_ids=(2,)
)
LAWS: list[tuple[dict[str, object], Mix]] = [
    ({"method": "weighted", "weights": [0.6, 0.4]}, weighted(0.6, 0.4)),
    ({"method": "contrastive", "mu": 0.5, "plausibility": 0.3}, contrastive(0.5, 0.3)),
    ({"method": "weighted", "weights": [0.5, 0.3, 0.2]}, weighted(0.5, 0.3, 0.2)),
]
WEIGHTED = LAWS[0][0]


def other(vocab: int = 3) -> ToyModel:
    return ToyModel(vocab, order=1, seed=5, sharpness=1.5)


def error(
    drafter: Drafter, ensemble: dict[str, Any], mix: Mix, params: SamplingParams, length: int = 3, **how: Any
) -> float:
    """Total variation between what the engine writes and the blend by the book."""
    models = toys(len(ensemble.get("weights", (0, 0))))
    engine = ensemble_engine(models, ensemble, drafter=drafter, **how)
    found = enumerated_distribution(engine, PROMPT, params, length)
    engine.check_integrity()
    assert engine.metrics().kv_cache_usage == 0
    return total_variation(found, joint_distribution_of(Blended(models, mix), params, PROMPT, length))


@pytest.mark.parametrize("acceptance_method", ["recursive", "match"])
@pytest.mark.parametrize("parents", [(-1, -1, 1), (-1, 0, -1, 2, 2, 4)])
def test_chosen_trees(acceptance_method: str, parents: tuple[int, ...]) -> None:
    drafter = ScriptedDrafter((0, 1, 2, 0, 1, 2)[: len(parents)], parents)
    for ensemble, mix in LAWS:
        assert error(drafter, ensemble, mix, MIXED, 4, acceptance_method=acceptance_method, k=3, max_nodes=6) < EXACT


@pytest.mark.parametrize("params", [PLAIN, MIXED], ids=["plain", "mixed"])
def test_drawn_trees(params: SamplingParams) -> None:
    for ensemble, mix in LAWS:
        shape: dict[str, Any] = {"k": 2, "widths": (2, 1), "max_nodes": 3}
        assert error(ModelDrafter(other()), ensemble, mix, params, 2, acceptance_method="recursive", **shape) < EXACT


def branching(
    commit: Callable[[EnsembleVerifier, Sequence[Commit]], None] = EnsembleVerifier.commit,
) -> tuple[float, int]:
    """The error under drafts whose second branch is the long one, and how often that was kept."""
    kept = 0

    def counted(self: EnsembleVerifier, commits: Sequence[Commit]) -> None:
        nonlocal kept
        kept += sum(found.path[:2] == (1, 2) for found in commits)
        commit(self, commits)

    with patch.object(EnsembleVerifier, "commit", counted):
        wrong = error(
            ScriptedDrafter((0, 1, 0), (-1, -1, 1)), *LAWS[0], PLAIN, 4, acceptance_method="match", k=2, max_nodes=3
        )
    return wrong, kept


def test_a_cache_whose_branch_is_not_moved_is_seen() -> None:
    """Every model has to keep the accepted branch, not the first."""
    wrong, kept = branching()
    assert wrong < EXACT
    assert kept

    def first_only(self: EnsembleVerifier, commits: Sequence[Commit]) -> None:
        self._decoder.models[0].commit(commits)

    assert branching(first_only)[0] > SEEN


def listed(count: int = 5) -> list[Request]:
    """Requests with ensembles of their own, and a member of weight 0."""
    ensembles = [
        None,
        {"method": "single"},
        {"method": "contrastive", "mu": 0.5},
        {"method": "weighted", "lambda": 0.0},
    ]
    params = [SamplingParams(max_tokens=24, seed=3), SamplingParams(max_tokens=24, temperature=0)]
    prompts = [tuple((3 * n + i * i) % 6 if i > 5 else i for i in range(2 + 3 * n)) for n in range(count)]
    return [
        replace(make_request(f"r{n}", prompt, params[n % 2]), ensemble=ensembles[n % len(ensembles)])
        for n, prompt in enumerate(prompts)
    ]


def engine(pages: int = 256, **how: Any) -> Engine:
    models = [with_pool(model, pages, 4) for model in toys(2, 6, sharpness=2.0)]
    return ensemble_engine(models, WEIGHTED, drafter=ModelDrafter(with_pool(ToyModel(6, seed=9), 256, 4)), **how)


@pytest.mark.parametrize("execution_mode", ["auto", "sequential", "pipelined", "draft-ahead", "draft-for-outcomes"])
def test_every_round_writes_what_standard_decoding_writes(execution_mode: str) -> None:
    """Several ensembles at a time, chunked prefill, few sequences, full caches."""
    wanted = tokens_of(run_all(ensemble_engine(toys(2, 6, sharpness=2.0), WEIGHTED, "standard"), listed()))
    hows: list[dict[str, Any]] = [
        {},
        {"max_num_batched_tokens": 7},
        {"max_num_seqs": 2},
        {"pages": 14},
        {"drafter_executor": "inline"},
    ]
    for how in hows:
        one = engine(k=3, execution_mode=execution_mode, **how)
        assert tokens_of(run_all(one, listed())) == wanted, how
        assert bool(one.metrics().num_preemptions) is ("pages" in how)
        assert one.metrics().execution_mode_info["execution_mode"] == (
            "sequential" if execution_mode == "auto" else execution_mode
        )
        one.close()
    one = engine(k=3, max_nodes=6, execution_mode=execution_mode)
    assert tokens_of(run_all(one, listed())) == wanted
    one.close()


def test_models_without_a_part_are_not_asked() -> None:
    """Nor do they offer what they have not computed."""
    one = engine(k=3)
    prompt = tuple(n % 6 for n in range(13))
    single = replace(make_request("a", prompt, PLAIN), ensemble={"method": "single"})
    (*_, last) = run_all(one, [single])["a"]
    assert last.stats is not None
    assert set(last.stats.model_calls) == {"m0"}
    (*_, last) = run_all(one, [make_request("b", prompt, PLAIN)])["b"]
    assert last.stats is not None
    assert last.stats.cached_prompt_tokens == 0
    (*_, last) = run_all(one, [make_request("c", prompt, PLAIN)])["c"]
    assert last.stats is not None
    assert last.stats.cached_prompt_tokens == 12
