"""Time models computed from sizes: the declared times of other scenarios, and experts that a forward reads."""

from __future__ import annotations

import importlib
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture
def targets(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT))
    return importlib.import_module("benchmarks.papers.large_targets")


def test_the_rule_gives_the_declared_times_of_the_70b_target(targets: ModuleType) -> None:
    declared = targets.Scenario.read(targets.FOLDER / "cosine-cost.yaml").target.cost
    own = targets.LLAMA_70B.cost(targets.a100(4), declared.sequence)
    assert own.fixed == pytest.approx(declared.fixed, rel=0.1)
    assert own.slopes == pytest.approx(declared.slopes, rel=0.1)


@pytest.mark.parametrize("tokens", [1, 2, 5, 20])
def test_tokens_choose_as_many_experts_as_draws_do(targets: ModuleType, tokens: int) -> None:
    chance = np.random.default_rng(7)
    chosen = chance.random((4000, tokens, 8)).argsort(-1)[..., :2]
    drawn = np.mean([len(np.unique(each)) for each in chosen])
    assert targets.MIXTRAL.distinct(tokens) == pytest.approx(drawn, abs=0.06)


def test_a_mixture_reads_all_experts_in_large_batches_alone(targets: ModuleType) -> None:
    server = targets.a100(8)
    mixture = targets.MIXTRAL.cost(server, 0.0).built(targets.FOLDER)
    for tokens in range(1, 200):
        assert mixture.seconds(0.0, tokens, 1.0) == pytest.approx(targets.MIXTRAL.seconds(server, tokens), rel=0.01)
    whole = targets.Size(targets.MIXTRAL.shared + 8 * targets.MIXTRAL.expert, targets.MIXTRAL.cache)
    read = server.read(targets.BYTES * whole.shared)
    assert mixture.seconds(0.0, 1.0, 1.0) < 0.3 * read
    assert read < mixture.seconds(0.0, 64.0, 1.0) < 1.2 * read
    assert all(late < early for early, late in zip(mixture.slopes, mixture.slopes[1:], strict=False))


def test_scenarios_differ_from_their_originals_in_times_alone(targets: ModuleType) -> None:
    given = targets.Scenario.read(targets.FOLDER / "cosine-cost.yaml")
    computed, kept = targets.qwen_scenario(True), targets.qwen_scenario(False)
    assert [each.name for each in computed.variants] == [each.name for each in given.variants]
    assert kept.drafting == given.drafting and kept.variants == given.variants
    pooled = [each.drafting for each in computed.variants if each.drafting is not None]
    assert {each.cost for each in pooled} == {computed.drafting.cost} != {given.drafting.cost}
    assert computed.target.cost.fixed < 0.5 * given.target.cost.fixed
    fast = targets.llama_scenario()
    assert fast.target == given.target and targets.draft_token_ms(fast) == pytest.approx(0.42, abs=0.01)
    assert targets.draft_token_ms(given) == pytest.approx(4.0, abs=0.05)
    assert targets.vicuna_scenario().kv_tokens == pytest.approx(140_000, rel=0.01)
    assert len(targets.mixtral_scenario().target.cost.slopes) == len(targets.KNEES) + 1


def test_a_full_engine_serves_what_the_time_model_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT))
    rates = importlib.import_module("benchmarks.papers.smartspec_rates")
    scenarios = importlib.import_module("benchmarks.papers.scenarios")
    given = rates.SCENARIOS["7B"]()
    closed = given.arrivals.model_copy(update={"kind": "closed", "rates": (), "concurrency": (given.max_num_seqs,)})
    full = given.model_copy(update={"arrivals": closed, "requests": 512, "variants": given.variants[:1]})
    (run,) = scenarios.simulated(full)["runs"]
    assert run["requests_per_second"] == pytest.approx(rates.most_served(full), rel=0.05)


def test_tau_moves_from_the_target_to_the_drafter(monkeypatch: pytest.MonkeyPatch) -> None:
    """Equation 8 with a fixed tau: 0 is the target, 1 the drafter, acceptance rises in between."""
    monkeypatch.syspath_prepend(str(ROOT))
    tau = importlib.import_module("benchmarks.papers.dsd_tau")
    torch.manual_seed(0)
    target, drafter = torch.randn(2, 20, 9, dtype=torch.float64)
    text = tau.ReferenceRows(target, drafter, torch.zeros(20, dtype=torch.long))
    found = [tau.figures(text, value) for value in (0.0, 0.2, 0.5, 1.0)]
    rates, distances, lost = zip(*found, strict=True)
    assert list(rates) == sorted(rates) and rates[-1] == pytest.approx(20)
    assert list(distances) == sorted(distances) and distances[0] == pytest.approx(0, abs=1e-12)
    assert lost[0] == pytest.approx(0, abs=1e-9)
    p, q = target.softmax(-1), drafter.softmax(-1)
    half = (p * q).sqrt()
    assert torch.allclose(tau.relax(p.log(), q.log(), 0.5).exp(), half / half.sum(-1, keepdim=True))
