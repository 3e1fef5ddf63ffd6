"""Trees of a configuration: shapes, acceptance methods, declared distribution, drafters with other vocabularies."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, models

from cospec.assembly.drafters import EngineHost, check_drafters
from cospec.config import SpeculativeConfig, speculative_config
from cospec.core.drafter_capabilities import DrafterCapabilities
from cospec.core.types import BatchState, DraftBudget, Request, RequestState, SpeculationParams
from cospec.drafters.cross_tokenizer import MappedVocab
from cospec.drafters.model import ModelDrafter
from cospec.drafters.ngram import NgramDrafter
from cospec.errors import InvalidInput
from cospec.models.loading import LoadOptions
from cospec.models.toy import ToyModel
from cospec.policies.fixed import Fixed
from cospec.sampling_params import SamplingParams
from harness.llamas import load, write_pair
from harness.pools import pool_of, toy_drafters
from harness.toys import ScriptedDrafter, make_request, run_all, toy_engine

WIDE = SamplingParams(max_tokens=12)


def test_a_fixed_shape() -> None:
    sequence = RequestState(Request("s", (1,), SamplingParams(), 0), [1, 2])
    assert Fixed(4).plan(BatchState([sequence])) == [DraftBudget(4, 4)]
    assert Fixed(4, 12, (3, 2, 1, 1)).plan(BatchState([sequence])) == [DraftBudget(4, 12, (3, 2, 1, 1))]
    assert Fixed(3, None, (3, 2)).plan(BatchState([sequence])) == [DraftBudget(3, 15, (3, 2))]
    assert Fixed(2, None, (3, 2, 2)).plan(BatchState([sequence])) == [DraftBudget(2, 9, (3, 2))]
    assert Fixed(4, None, (9, 9, 9)).plan(BatchState([sequence]))[0].max_nodes == 64


def test_shapes_come_from_the_configuration() -> None:
    given = speculative_config(
        {"method": "draft_model", "num_speculative_tokens": 4, "max_nodes": 12, "widths": [3, 2]}
    )
    assert (given.max_nodes, given.widths, given.policy_name) == (12, (3, 2), "fixed")
    assert given.branches(DrafterCapabilities())
    assert not SpeculativeConfig(num_speculative_tokens=4).branches(DrafterCapabilities(trees=True))
    assert SpeculativeConfig().branches(DrafterCapabilities(trees=True))
    assert not given.branches(DrafterCapabilities(chains=True))


@pytest.mark.parametrize(
    ("key", "value", "named"),
    [
        ("max_nodes", 65, "max_nodes"),
        ("max_nodes", 0, "max_nodes"),
        ("widths", [3, 0], "widths"),
        ("widths", 3, "widths"),
    ],
)
def test_a_bad_shape_is_one_sentence(key: str, value: object, named: str) -> None:
    with pytest.raises(InvalidInput, match=f"speculative_config.{named}"):
        speculative_config({"method": "draft_model", key: value})


def test_widths_for_a_drafter_of_chains_are_refused() -> None:
    check_drafters(SpeculativeConfig(method="suffix", widths=(2, 2)))
    with pytest.raises(InvalidInput, match=r"speculative_config.widths.*\[2, 2\].*left out for ngram"):
        check_drafters(SpeculativeConfig(method="ngram", widths=(2, 2)))


@pytest.mark.parametrize(
    ("shape", "acceptance_method"), [({}, "block"), ({"max_nodes": 7}, "recursive"), ({"widths": (2,)}, "recursive")]
)
def test_auto_judges_sampled_trees_by_recursive_rejection(shape: dict[str, Any], acceptance_method: str) -> None:
    engine = toy_engine(ToyModel(5, seed=1), ModelDrafter(ToyModel(5, seed=2)), k=3, **shape)
    resolve = engine.parts.input_processor.resolve
    assert resolve(make_request("a", (1, 2), WIDE)).speculation.acceptance_method == acceptance_method
    assert resolve(make_request("b", (1, 2), SamplingParams(seed=3))).speculation.acceptance_method == "match"
    assert resolve(make_request("c", (1, 2), SamplingParams(temperature=0))).speculation.acceptance_method == "match"


def test_auto_uses_block_for_chains() -> None:
    for drafter in (NgramDrafter(), pool_of(toy_drafters(5), "mix", vocab_size=5)):
        engine = toy_engine(ToyModel(5, seed=1), drafter, k=3, max_nodes=9)
        assert (
            engine.parts.input_processor.resolve(make_request("a", (1, 2), WIDE)).speculation.acceptance_method
            == "block"
        )


def test_requests_with_a_rule_for_chains_get_chains() -> None:
    drafter = ModelDrafter(ToyModel(5, seed=1))
    engine = toy_engine(ToyModel(5, seed=1), drafter, k=3, max_nodes=9)
    chosen = {name: SpeculationParams(acceptance_method=name) for name in ("block", "recursive")}
    requests = [make_request(name, (1, 2), WIDE, speculation=choice) for name, choice in chosen.items()]
    stats = {id: events[-1].stats for id, events in run_all(engine, requests).items()}
    assert stats["block"] is not None
    assert stats["recursive"] is not None
    assert 0 < stats["block"].drafted <= 3 * stats["block"].drafts
    assert stats["block"].accepted > 0, "the drafter is the target: chains were judged, not left out"
    assert stats["recursive"].drafted > 3 * stats["recursive"].drafts


def test_a_rule_that_is_not_exact_is_declared() -> None:
    engine = toy_engine(ToyModel(5, seed=1), ScriptedDrafter([0, 1], [-1, -1]), k=2, max_nodes=3)
    for name, distribution in (("typical", "typical(target)"), ("recursive", "target")):
        events = run_all(
            engine, [make_request(name, (1, 2), WIDE, speculation=SpeculationParams(acceptance_method=name))]
        )
        assert {event.distribution for event in events[name]} == {distribution}
        assert {event.exact for event in events[name]} == {distribution == "target"}
    quiet = SpeculationParams(acceptance_method="typical", enabled=False)
    events = run_all(engine, [make_request("off", (1, 2), WIDE, speculation=quiet)])
    assert {event.distribution for event in events["off"]} == {"target"}


def letters(folder: Path, first: str, count: int) -> None:
    vocabulary = {chr(ord(first) + n): n for n in range(count)}
    Tokenizer(models.BPE(vocab=vocabulary, merges=[])).save(str(folder / "tokenizer.json"))


def test_a_drafter_with_another_vocabulary_is_joined_or_refused(tmp_path: Path) -> None:
    target, own = tmp_path / "target", tmp_path / "own"
    write_pair(target, own)
    options = LoadOptions(device="cpu", dtype="float32")
    host = EngineHost(load(target), target, None, None, options)
    assert host.load_mapped(str(own))[1].same
    letters(target, "a", 64)
    letters(own, "c", 64)
    _, vocabulary = host.load_mapped(str(own))
    assert isinstance(vocabulary, MappedVocab)
    assert vocabulary.shared == {n + 2: n for n in range(62)}
    with pytest.raises(InvalidInput, match="vocabulary of 64 tokens"):
        host.load_drafter(str(own))
    letters(own, "\u4e00", 64)
    with pytest.raises(InvalidInput, match="none of whose tokens"):
        host.load_mapped(str(own))
