"""What a pool's configuration says: built from plain keys, refused in one sentence that names the drafter."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import cospec
from cospec.config import EngineConfig
from cospec.core.interfaces import Model
from cospec.core.types import DraftBudget, DraftContext
from cospec.drafters.pool.options import NamedDrafter, PoolOptions, check_distributions
from cospec.drafters.pool.pool import PoolDrafter
from cospec.errors import CospecError, InvalidInput, ModelError
from cospec.models.model_folder import resolve
from cospec.models.toy import ToyModel
from cospec.plugin_options import parse
from cospec.rng.random_streams import StreamKind
from cospec.sampling_params import SamplingParams
from harness.pools import InlineHost, toy_drafters

V = 5
GREEDY = SamplingParams(temperature=0)


def load(name: str) -> Model:
    if name == "none":
        raise InvalidInput("speculative_config.model", name, "a model that exists")
    return ToyModel(V, seed=2)


def resolved(name: str) -> Model:
    assert resolve(name)
    return ToyModel(V)


def build(load: Callable[[str], Model] = load, **given: Any) -> PoolDrafter:
    return PoolDrafter.build(
        parse(PoolOptions, given, "speculative_config."), InlineHost(ToyModel(V, order=2, seed=1, sharpness=2.0), load)
    )


def test_a_pool_is_built_from_plain_keys() -> None:
    listed = [{"name": "code", "method": "draft_model", "model": "toy"}, {"name": "copy", "method": "ngram"}]
    given = {"method": "pool", "combiner": "fuse", "routing": "hedge", "drafters": listed, "max_nodes": 16}
    config = EngineConfig.build({"speculative_config": given}).speculative_config
    assert config is not None
    pool = build(**config.options)
    assert pool.member_names == ("code", "copy")
    assert [member.stepper is not None for member in pool.members] == [True, False]
    assert [member.costless for member in pool.members] == [False, True]
    assert build().member_names == ("model", "copy")


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"drafters": []}, "speculative_config.drafters"),
        ({"combiner": "sum"}, "speculative_config.combiner is 'sum'"),
        ({"routing": "best"}, "speculative_config.routing is 'best'"),
        ({"deadline": 0}, "speculative_config.deadline"),
        ({"voting": True}, "key speculative_config.voting"),
        ({"drafters": [{"name": "a", "method": "pool"}]}, "speculative_config.drafters[0].method is 'pool'"),
        ({"drafters": [{"name": "a"}]}, "speculative_config.drafters[0].method is missing"),
        ({"drafters": [{}]}, "speculative_config.drafters[0].method is missing"),
        ({"drafters": [{"name": "a", "method": ["ngram"]}]}, "speculative_config.drafters[0].method is ['ngram']"),
        ({"drafters": [{"name": None, "method": "ngram"}]}, "speculative_config.drafters[0].name is None"),
        ({"drafters": [{"name": " ", "method": "ngram"}]}, "speculative_config.drafters[0].name is ' '"),
        ({"drafters": [{"name": "a\n", "method": "ngram"}]}, "speculative_config.drafters[0].name is 'a\\n'"),
        ({"drafters": [{"name": "\ud800", "method": "ngram"}]}, "speculative_config.drafters[0].name is '\\ud800'"),
        ({"drafters": [{"name": "target", "method": "ngram"}]}, "speculative_config.drafters[0].name is 'target'"),
        ({"drafters": [{"method": "ngram"}, {"method": "ngram"}]}, "speculative_config.drafters[1].name is 'ngram'"),
        (
            {"drafters": [{"method": "ngram"}, {"name": "copy", "method": "ngram", "prompt_lookup_max": 0}]},
            "speculative_config.drafters[1].prompt_lookup_max is 0",
        ),
        (
            {"drafters": [{"name": "x", "method": "draft_model", "model": "none"}]},
            "speculative_config.drafters[0] 'x': model is 'none'",
        ),
    ],
)
def test_wrong_options_are_one_sentence_that_names_the_drafter(given: dict[str, Any], sentence: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        build(**given)
    assert str(caught.value).startswith(sentence)
    assert str(caught.value).endswith(".")


def test_mix_refuses_drafters_of_whole_drafts() -> None:
    listed = [NamedDrafter(name, drafter) for name, drafter in toy_drafters(3, ("first", "copy", "foreign")).items()]
    check_distributions(listed[:2], "mix")
    with pytest.raises(InvalidInput, match=r"drafters\[2\] is 'foreign'"):
        check_distributions(listed, "mix")


def test_missing_model_names_its_drafter() -> None:
    with pytest.raises(ModelError, match=r"^speculative_config\.drafters\[0\] 'code': model is 'zoo:nope'"):
        build(resolved, drafters=[{"name": "code", "method": "draft_model", "model": "zoo:nope"}])


@pytest.mark.parametrize(
    ("member", "sentence"),
    [
        ({"method": "draft_model", "model": "zoo:nope"}, " 'x': model is 'zoo:nope'"),
        ({"method": "draft_model", "model": "/no/folder"}, " 'x': model is '/no/folder'"),
        ({"method": "draft_model", "model": 5}, ".model is 5"),
        ({"method": "heads", "heads": "/no/folder"}, ".heads is '/no/folder'"),
        ({"method": ["ngram"]}, ".method is ['ngram']"),
        ({"method": "ngram", "prompt_lookup_min": 5, "prompt_lookup_max": 2}, ".prompt_lookup_min is 5"),
    ],
)
def test_the_engine_names_the_drafter_that_is_wrong(member: dict[str, Any], sentence: str) -> None:
    """Before its models are loaded too, where room for their caches is found."""
    listed = [{"name": "sound", "method": "ngram"}, {"name": "x", **member}]
    with pytest.raises(CospecError) as caught:
        cospec.LLM("zoo", {"method": "pool", "drafters": listed})
    assert str(caught.value).startswith(f"speculative_config.drafters[1]{sentence}")
    assert str(caught.value).endswith(".")


def test_at_most_bounds_the_drafters() -> None:
    pool = build(at_most=1, drafters=[{"name": f"m{n}", "method": "draft_model", "model": "toy"} for n in range(3)])
    assert pool.setting.at_most == 1
    assert pool.capabilities.num_drafters == 1, "no policy asks for more"
    for count, wanted in ((None, 1), (2, 1)):
        pool.propose(
            [DraftContext(f"s{count}", [1, 2, 3], 1, GREEDY, 0, StreamKind.TARGET)], [DraftBudget(2, 8, drafters=count)]
        )
        assert pool.records[f"s{count}"].weights.idle.count(0) == wanted


def test_the_engine_names_the_drafter_whose_model_cannot_be_read(tmp_path: Path) -> None:
    member: dict[str, Any] = {"name": "x", "method": "draft_model", "model": str(tmp_path)}
    for text, expected in (("", "a JSON object"), ("{}", "safetensors"), (None, "no readable config.json")):
        file = tmp_path / "config.json"
        file.unlink() if text is None else file.write_text(text, encoding="utf-8")
        with pytest.raises(ModelError, match=rf"^speculative_config\.drafters\[0\] 'x': .*{expected}.*\.$"):
            cospec.LLM("zoo", {"method": "pool", "drafters": [member]})
