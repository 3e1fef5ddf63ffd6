"""Several models in one engine: refused options, bad ensembles in a batch with other requests, prefixes, interfaces."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast

from cospec import register_blend
from cospec.assembly.build import build_components, build_engine
from cospec.assembly.ensembles import build_proposer_policy
from cospec.config import CollaborationConfig, EngineConfig
from cospec.core.types import Event, FinishReason, SpeculationParams
from cospec.drafters.ngram import NgramDrafter
from cospec.ensemble.blends.registry import build_blend
from cospec.ensemble.collaborative import Collaborative
from cospec.ensemble.ensemble import distinct, divergences_of
from cospec.ensemble.proposed_tokens import ProposalChains
from cospec.ensemble.verifier import EnsembleKVManager
from cospec.errors import CospecError, InvalidInput
from cospec.llm import LLM
from cospec.models.block_manager import BlockPool
from cospec.models.toy import ToyModel
from cospec.native import library
from cospec.sampling_params import SamplingParams
from harness.ensembles import ensemble_engine, toys
from harness.llamas import write_pair
from harness.pools import pool_of, toy_drafters
from harness.toys import make_request, run_all, tokens_of, with_pool

LAW = {"method": "weighted", "weights": [0.6, 0.4]}
BOTH = build_blend(LAW, 2)
PARAMS = SamplingParams(max_tokens=12, seed=3)

register_blend("nan-test", lambda logits: logits[0] * torch.nan)
seen: list[int] = []


def count_threads(logits: Sequence[torch.Tensor]) -> torch.Tensor:
    """The first model's logits; writes down how many threads torch has."""
    seen.append(torch.get_num_threads())
    return logits[0]


register_blend("threads-test", count_threads)
register_blend("shape-test", lambda logits: logits[0][:, :1])


NAN = {"method": "nan-test"}
BAD_LAWS = [
    ({"method": "weighted", "weights": [1, 1]}, "whose sum is 2"),
    ({"method": "weighted", "lambda": 1.5}, "ensemble.lambda is 1.5"),
    ({"method": "weighted", "lambda": -0.1}, "ensemble.lambda is -0.1"),
    ({"method": "contrastive", "mu": -1}, "ensemble.mu"),
    ({"method": "no-such-blend"}, "no-such-blend"),
]


PAIR: dict[str, Any] = {"models": ["zoo", "zoo:drafter"], "ensemble": {"method": "weighted"}}


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"models": ["zoo"]}, "models is zoo"),
        ({"models": []}, "models is []"),
        ({"models": "zoo"}, "a list of models"),
        ({"models": ["zoo", "no/such-folder"], "ensemble": {"method": "single"}}, "no/such-folder"),
        ({"models": ["zoo", "zoo:drafter"]}, "ensemble is missing"),
        (
            {"models": ["zoo", "zoo:drafter"], "ensemble": {"method": "weighted", "weights": [0.6, 0.5]}},
            "whose sum is 1.1",
        ),
        (
            {"models": ["zoo", "zoo:drafter"], "ensemble": {"method": "weighted", "lambda": 1.5}},
            "ensemble.lambda is 1.5",
        ),
        ({"models": ["zoo", "zoo:drafter"], "ensemble": "{"}, "ensemble"),
        (PAIR | {"collaboration": {"gamma": [1, 2, 3]}}, "for each of the 2 models"),
        (PAIR | {"collaboration": {"gamma": 0}}, "collaboration.gamma is 0"),
        (PAIR | {"collaboration": {"gamma": [2, "x"]}}, "gamma is [2, 'x']"),
        (PAIR | {"ensemble": {}}, "ensemble.method is missing"),
        (PAIR | {"collaboration": {"proposer": 2}}, "from 0 to 1"),
        ({"models": ["zoo", "zoo:drafter"], "collaboration": {"proposal": "both"}}, "collaboration.proposal"),
        ({"models": ["zoo", "zoo:drafter"], "collaboration": {"speed": 1}}, "collaboration.speed"),
        (
            PAIR | {"speculative_config": {"execution_mode": "pipelined"}},
            "execution_mode is 'pipelined'",
        ),
        (PAIR | {"speculative_config": {"policy": "fixed"}}, "policy is 'fixed'"),
        (
            PAIR | {"speculative_config": {"num_speculative_tokens": 3}},
            "tokens is 3",
        ),
        (PAIR | {"speculative_config": {"method": "ngram", "policy": "off"}}, "'standard' disables proposals"),
        (
            PAIR | {"speculative_config": {"method": "ngram"}, "collaboration": {"gamma": 2}},
            "collaboration.gamma is 2",
        ),
    ],
)
def test_one_sentence(given: dict[str, Any], says: str) -> None:
    def build() -> None:
        config = EngineConfig.build(given)
        build_proposer_policy(config.collaboration, len(config.models or ()), BOTH)
        build_components(config)

    with pytest.raises(CospecError) as raised:
        build()
    assert says in str(raised.value)
    assert type(raised.value).__module__ == "cospec.errors"
    assert "\n" not in str(raised.value)


def test_vocabularies_that_differ() -> None:
    with pytest.raises(InvalidInput, match="m1 with 6 tokens"):
        ensemble_engine([ToyModel(5), ToyModel(6)], LAW)


@pytest.mark.parametrize(("ensemble", "says"), [("nan-test", "not numbers"), ("shape-test", r"returned a tensor \[")])
def test_a_bad_function_harms_no_neighbour(ensemble: str, says: str) -> None:
    alone = tokens_of(run_all(ensemble_engine(toys(2, 5), LAW), [make_request("good", (0, 1), PARAMS)]))
    engine = ensemble_engine(toys(2, 5), LAW)
    bad = make_request("bad", (0, 1), PARAMS, ensemble={"method": ensemble})
    events = run_all(engine, [make_request("good", (0, 1), PARAMS), bad])
    assert tokens_of(events)["good"] == alone["good"]
    (last,) = events["bad"]
    assert last.finish is FinishReason.ERROR
    assert __import__("re").search(says, str(last.error))
    assert last.distribution == ensemble
    assert engine.metrics().kv_cache_usage == 0


ZOO = ["zoo", "zoo:drafter"]
ROOM: dict[str, Any] = {"kv_cache_memory_bytes": 64 << 20, "threads": 1}


@pytest.mark.parametrize("proposal", ["standard", "naive", "alternate"])
def test_on_the_zoo_a_bad_request_harms_no_neighbour(proposal: str) -> None:
    """A function that gives no numbers, weights whose sum is 2, a lambda that is none: one sentence, for them alone."""
    engine = build_engine(
        EngineConfig.build({"models": ZOO, "ensemble": LAW, "collaboration": {"proposal": proposal}, **ROOM})
    )
    params = SamplingParams(max_tokens=12, seed=3, ignore_eos=True)
    alone = tokens_of(run_all(engine, [make_request("good", (9, 8, 7), params)]))["good"]
    for request in (make_request("good", (9, 8, 7), params), make_request("bad", (5, 6), params, ensemble=NAN)):
        engine.add(request)
    events: dict[str, list[Event]] = {"good": [], "bad": []}
    for ensemble, says in BAD_LAWS:
        with pytest.raises(InvalidInput, match=says) as raised:
            engine.add(make_request("worse", (5, 6), params, ensemble=ensemble))
        assert "\n" not in str(raised.value)
        for event in engine.step():
            events[event.id].append(event)
    while engine.has_work:
        for event in engine.step():
            events[event.id].append(event)
    assert tokens_of({"good": events["good"]})["good"] == alone
    assert events["bad"][-1].finish is FinishReason.ERROR
    assert "not numbers" in str(events["bad"][-1].error)
    engine.check_integrity()


def test_torch_keeps_its_threads() -> None:
    """Within a round of native models torch has one thread; others in the process keep theirs."""
    llm = LLM(models=ZOO, ensemble={"method": "threads-test"}, **ROOM)
    seen.clear()
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        llm.generate([[1, 2, 3]], SamplingParams(max_tokens=2))
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
    assert set(seen) == {1 if library.available() else 2}


def test_requests_may_bring_an_ensemble_or_not() -> None:
    engine = ensemble_engine(toys(2, 5), LAW)
    events = run_all(engine, [make_request("r", (0,), PARAMS, ensemble={"method": "contrastive", "mu": 0.5})])
    assert {event.distribution for event in events["r"]} == {"contrastive(mu=0.5)"}
    with pytest.raises(InvalidInput, match="sum is 2"):
        engine.add(make_request("r", (0,), PARAMS, ensemble={"method": "weighted", "weights": [1, 1]}))
    with pytest.raises(InvalidInput, match="contrastive with two"):
        ensemble_engine(toys(3, 5), {"method": "weighted"}).add(
            make_request("r", (0,), PARAMS, ensemble={"method": "contrastive"})
        )
    from harness.toys import toy_engine

    with pytest.raises(InvalidInput, match="requests may not choose"):
        toy_engine(ToyModel(5), None).add(make_request("r", (0,), PARAMS, ensemble=LAW))


def test_who_names_a_model_means_it_as_a_drafter() -> None:
    """As over one model; it is none of the members."""
    config = EngineConfig.build(PAIR | {"speculative_config": {"model": "zoo:code"}, **ROOM})
    (*_, last) = run_all(build_engine(config), [make_request("r", (9, 8, 7), PARAMS)])["r"]
    assert last.stats is not None
    assert set(last.stats.model_calls) == set(ZOO)
    assert last.stats.drafted


def test_a_plugin_registers_a_blend(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Plug-ins are imported before the ensemble is checked."""
    code = "import cospec\ncospec.register_blend('of-a-plugin', lambda logits: logits[0])\n"
    (tmp_path / "blend_plugin.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    given = {"models": ["zoo", "no/such-folder"], "ensemble": {"method": "of-a-plugin"}}
    with pytest.raises(InvalidInput, match=r"ensemble.method is 'of-a-plugin'"):
        build_components(EngineConfig.build(given))
    with pytest.raises(CospecError, match="no/such-folder"):
        build_components(EngineConfig.build({**given, "plugins": ["blend_plugin"]}))
    with pytest.raises(InvalidInput, match=r"plugin is no_such_plugin \(No module .*\)"):
        build_components(EngineConfig.build({"plugins": ["no_such_plugin"]}))


def test_a_rule_that_is_not_exact_is_declared() -> None:
    asked = make_request("r", (0,), PARAMS, speculation=SpeculationParams(acceptance_method="typical"))
    events = run_all(ensemble_engine(toys(2, 5), LAW), [asked])
    assert {event.distribution for event in events["r"]} == {"typical(weighted(0.6, 0.4))"}


def test_requests_choose_what_they_may() -> None:
    engine = ensemble_engine(toys(2, 5), LAW, request_may_choose=("off",))
    engine.add(make_request("plain", (0,), PARAMS, speculation=SpeculationParams(enabled=False)))
    with pytest.raises(InvalidInput, match=r"speculation.acceptance_method is 'typical'"):
        engine.add(make_request("r", (0,), PARAMS, speculation=SpeculationParams(acceptance_method="typical")))


def test_requests_choose_a_policy_where_there_is_one() -> None:
    """The members' own proposals follow none of the table's."""
    asked = make_request("r", (0, 1), PARAMS, speculation=SpeculationParams(policy="off"))
    with pytest.raises(InvalidInput, match=r"speculation.policy is 'off'"):
        ensemble_engine(toys(2, 5), LAW).add(asked)
    drafted = []
    for request in (asked, make_request("r", (0, 1), PARAMS)):
        (*_, last) = run_all(ensemble_engine(toys(2, 5), LAW, drafter=NgramDrafter(1, 3)), [request])["r"]
        assert last.stats is not None
        drafted.append(last.stats.drafted)
    assert drafted[0] == 0 < drafted[1]


def test_pool_drafts_for_sampled_requests() -> None:
    """Its drafts have no q, so ``match`` judges them; a request may name some of its drafters."""
    pool = pool_of(toy_drafters(5, ("first", "second")), "vote", vocab_size=5)
    engine = ensemble_engine(toys(2, 5), LAW, drafter=pool)
    unseeded = SamplingParams(max_tokens=12)
    asked = make_request("r", (0, 1), unseeded, speculation=SpeculationParams(drafters=("second",)))
    (last,) = run_all(engine, [asked])["r"][-1:]
    assert last.stats is not None
    assert last.stats.drafted > 0
    assert set(last.stats.accepted_by_drafter) <= {"second"}
    assert set(engine.metrics().drafter_weights) == {"first", "second"}


def test_prefixes_are_shared_in_every_cache() -> None:
    models = [with_pool(model, 64, 4) for model in toys(2, 5)]
    engine = ensemble_engine(models, LAW, gamma=3)
    prompt = tuple(n % 5 for n in range(13))
    first = tokens_of(run_all(engine, [make_request("a", prompt, PARAMS)]))["a"]
    events = run_all(engine, [make_request("b", prompt, PARAMS)])
    assert tokens_of(events)["b"] == first
    stats = events["b"][-1].stats
    assert stats is not None
    assert stats.cached_prompt_tokens == 12
    for model in models:
        model.pages.check_integrity()
        assert model.pages.usage == 0


def test_joint_pages_agree_on_a_prefix() -> None:
    """A prefix that only one cache still has is computed again in all."""
    pools, lines = [BlockPool(8, 4), BlockPool(8, 4)], ProposalChains(2)
    pages, tokens = EnsembleKVManager(pools, lines.fed, lines.drop), list(range(20))
    assert pages.open_sequence("a", tokens) == 0
    assert pages.allocate("a", 20)
    line = lines.open("a", 20, 0)
    line.fed[:] = [20, 9]
    pages.cache_blocks("a", tokens, 20)
    pages.free("a")
    assert pages.open_sequence("b", tokens) == 8
    assert [len(pool.table("b")) for pool in pools] == [2, 2]
    assert pages.usage == 2 / 8
    assert not pages.allocate("b", 50)
    pages.free("b")
    pages.check_integrity()
    assert pages.usage == 0
    assert pages.capacity == 32


def test_model_calls_add_up() -> None:
    """Every output's calls are its own, and the engine's are fewer where outputs share them."""
    engine = ensemble_engine(toys(2, 5), LAW, gamma=2)
    (output,) = LLM.from_engine(engine).generate([[0, 1]], SamplingParams(max_tokens=20, n=3, seed=1))
    assert output.distribution == "weighted(0.6, 0.4)"
    for name in ("m0", "m1"):
        own = [part.stats.model_calls[name] for part in output.outputs]
        assert output.stats.model_calls[name] == sum(own)
        assert isinstance(engine.execution_mode, Collaborative) and 0 < engine.execution_mode.calls[name] < sum(own)


def test_equal_names_get_numbers() -> None:
    assert distinct(["a", "b", "a", "a"]) == ("a", "b", "a#2", "a#3")


def test_the_lengths_that_are_asked_for() -> None:
    standard = build_proposer_policy(CollaborationConfig(proposal="standard"), 2, BOTH)
    assert not standard.proposer_schedule.proposes
    given = build_proposer_policy(CollaborationConfig(proposal="naive", gamma=[2, 5], proposer=1), 2, BOTH)
    assert (given.proposer_schedule.gammas, given.proposer_schedule.order, given.proposer_schedule.alternate) == (
        (2, 5),
        (1, 0),
        False,
    )


def test_the_drafter_of_a_relaxed_target_proposes_by_default() -> None:
    relaxed = build_blend({"method": "adaptive", "max_divergence": 0.1}, 2)
    default, asked = CollaborationConfig(), CollaborationConfig(proposal="alternate")
    found = build_proposer_policy(default, 2, relaxed).proposer_schedule
    assert not found.alternate and found.order == (1, 0)
    for options, blend in ((default, BOTH), (asked, relaxed)):
        assert build_proposer_policy(options, 2, blend).proposer_schedule.alternate


@pytest.mark.parametrize(("native", "penalty"), [("auto", 0.0), ("off", 1.0)])
@pytest.mark.parametrize("temperature", [0.0, 0.5, 2.0])
def test_the_divergence_is_before_penalties_temperature_and_truncation(
    temperature: float, native: str, penalty: float
) -> None:
    models = toys(2, vocab=6, sharpness=2.0)
    for model in models:
        model.table = model.table.float()  # so that the library verifies, except after penalties
    law = {"method": "adaptive", "max_divergence": 0.3, "lambda1": 99.0, "lambda2": 1.0, "lambda3": 0.0}
    params = SamplingParams(max_tokens=12, temperature=temperature, top_k=3, frequency_penalty=penalty, seed=3)
    (output,) = LLM.from_engine(ensemble_engine(models, law, native=native)).generate([[0, 1]], params)
    tokens = [0, 1, *output.outputs[0].token_ids]
    rows = [torch.stack([model.logits(tokens[:end]) for end in range(2, len(tokens))]) for model in models]
    blended = build_blend(law, 2).combine(rows)
    assert output.divergence == pytest.approx(np.mean(divergences_of(blended, rows[0])), rel=1e-5)
    if temperature:
        sampled = np.mean(divergences_of(blended / temperature, rows[0] / temperature))
        assert output.divergence != pytest.approx(sampled, rel=0.05)


def write_tokenizer(folder: Path, vocabulary: dict[str, int]) -> None:
    """One word a token."""
    PreTrainedTokenizerFast(tokenizer_object=Tokenizer(WordLevel(vocabulary, unk_token="w0"))).save_pretrained(folder)


def test_words_that_differ(tmp_path: Path) -> None:
    """As many tokens, and other words."""
    folders = [tmp_path / "one", tmp_path / "two"]
    write_pair(*folders)
    for first, folder in enumerate(folders):
        write_tokenizer(folder, {f"w{(n + first) % 64}": n for n in range(64)})
    with pytest.raises(InvalidInput, match="whose tokens differ"):
        LLM(models=folders, ensemble=LAW)


def test_models_from_disk(tmp_path: Path) -> None:
    """Two Llamas by ``LLM``: paths, ensemble, model calls; greedy and seeded outputs of standard decoding."""
    folders = [tmp_path / "one", tmp_path / "two"]
    write_pair(*folders)
    for folder in folders:
        write_tokenizer(folder, {f"w{n}": n for n in range(64)})
    outputs = []
    for proposal in ("standard", "naive", "alternate"):
        llm = LLM(
            models=folders,
            ensemble=LAW,
            collaboration={"proposal": proposal, "gamma": 3},
            kv_cache_memory_bytes=1 << 22,
            threads=1,
        )
        assert llm.model_paths == tuple(folders)
        params = [SamplingParams(temperature=0, max_tokens=30), SamplingParams(seed=5, max_tokens=30)] * 2
        found = llm.generate([[1, 2, 3], [4, 5], [6], [7, 8, 9, 10]], params)
        assert {output.distribution for output in found} == {"weighted(0.6, 0.4)"}
        outputs.append([output.outputs[0].token_ids for output in found])
        calls = [sum(output.stats.model_calls.values()) for output in found]
        assert all(n == 60 for n in calls) if proposal == "standard" else all(n < 60 for n in calls), calls
    assert outputs[0] == outputs[1] == outputs[2]
