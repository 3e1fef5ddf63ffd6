"""Every entry of every table writes the tokens of one process with a target of two stages, here of a GGUF file."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
import transformers

from cospec.assembly.build import assemble
from cospec.assembly.components import TextInfo
from cospec.assembly.sharding import load_target
from cospec.config import EngineConfig, SpeculativeConfig
from cospec.core.engine import Engine
from cospec.core.interfaces import Model
from cospec.core.model_io import SequenceSlice, TokenBatch
from cospec.core.plugin_base import Drafter
from cospec.distributed.model import ShardedModel
from cospec.drafters.model import ModelDrafter
from cospec.drafters.ngram import NgramDrafter
from cospec.errors import InvalidInput
from cospec.models.loading import LoadOptions
from cospec.registry import (
    ACCEPTANCE_METHODS,
    COMBINERS,
    DRAFTERS,
    EXECUTION_MODES,
    LOGITS_PROCESSORS,
    POLICIES,
    ROUTINGS,
)
from cospec.sampling_params import SamplingParams
from harness.gguf_files import write_model
from harness.llamas import VOCAB, load
from harness.overlap import under
from harness.plugin import every
from harness.pools import InlineHost, pool_of
from harness.sharded_targets import PARAMS, Folders, requests, sharded
from harness.toys import run_all, tokens_of

pytestmark = pytest.mark.cluster

Outputs = dict[str, tuple[int, ...]]
PLAIN = SamplingParams(temperature=0.9, seed=5, max_tokens=12, stop_token_ids=tuple(range(0, VOCAB, 9)))
PROCESSED: dict[str, SamplingParams] = {
    "penalties": replace(PLAIN, repetition_penalty=3.0),
    "logit_bias": replace(PLAIN, logit_bias={1: 4.0}),
    "min_tokens": replace(PLAIN, min_tokens=9),
    "allowed_token_ids": replace(PLAIN, allowed_token_ids=tuple(range(48))),
    "bad_words_token_ids": replace(PLAIN, bad_words_token_ids=tuple((token,) for token in range(1, VOCAB, 4))),
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Folders:
    """A target in blocks, and a drafter like the target."""
    base = tmp_path_factory.mktemp("models")
    written = Folders.write(base)
    model = transformers.LlamaForCausalLM.from_pretrained(written.target, dtype=torch.float32)
    # Rows of 48 inputs do not fill the blocks of `ffn_down`.
    return Folders(write_model(base / "target.gguf", model, "Q8_0", kinds={"ffn_down": "F16"}), written.drafter)


@pytest.fixture(scope="module")
def target(folders: Folders) -> Iterator[ShardedModel]:
    with sharded(folders, 2) as model:
        yield model


@pytest.fixture(scope="module")
def whole(folders: Folders) -> Model:
    return load(folders.target)


def engine(target: Model, drafter: Drafter | None, **given: Any) -> Engine:
    speculative = SpeculativeConfig(**{"num_speculative_tokens": 3, "max_nodes": 6, **given})
    return Engine(assemble(target, drafter, speculative, EngineConfig(), TextInfo()))


def like(folders: Folders) -> Drafter:
    return ModelDrafter(load(folders.drafter))


def outputs(made: Engine, params: SamplingParams) -> Outputs:
    return tokens_of(run_all(made, requests(params)))


@pytest.fixture(scope="module")
def wanted(whole: Model) -> dict[str, Outputs]:
    """What one process writes without drafts."""
    return {name: outputs(engine(whole, None), params) for name, params in PARAMS.items()}


def test_logits_have_the_bits_of_one_process(folders: Folders, whole: Model, target: ShardedModel) -> None:
    """The control: the same target in floats has other logits."""
    batch, found = TokenBatch((SequenceSlice("a", 0, tuple(range(20)), (-1, 0, -1), 3),)), []
    for model in (whole, target, load(folders.target.with_name("target"))):
        model.pages.allocate("a", 48)
        found.append(model.forward(batch))
        model.free(["a"])
    assert torch.equal(found[0], found[1]) and not torch.equal(found[0], found[2])


@pytest.mark.parametrize("name", every(DRAFTERS))
def test_drafters(name: str, folders: Folders, target: ShardedModel, wanted: dict[str, Outputs]) -> None:
    cls = DRAFTERS.load(name)
    if cls.reads_hidden_states:
        options = LoadOptions(device="cpu", keep_hidden_states=True)
        with pytest.raises(InvalidInput, match="pipeline_parallel_size is 2; allowed is 1 for a drafter that reads"):
            load_target(EngineConfig(pipeline_parallel_size=2), [(str(folders.target), options)], options)
        return
    made = engine(target, cls.build(cls.Options(), InlineHost(target, lambda name: load(folders.drafter))))
    for _ in range(2):  # synthetic drafts replay the first run
        assert {params: outputs(made, PARAMS[params]) for params in PARAMS} == wanted
    assert sum(made.metrics().accepted_tokens.values()) > 0 and target.pages.usage == 0


@pytest.mark.parametrize("name", every(ACCEPTANCE_METHODS))
def test_acceptance_methods(name: str, folders: Folders, whole: Model, target: ShardedModel) -> None:
    """Methods of every kind draw the same numbers for logits from stages."""
    found = []
    for model in (whole, target):
        made = engine(model, like(folders), acceptance_method=name)
        found.append([outputs(made, params) for params in PARAMS.values()])
        assert sum(made.metrics().accepted_tokens.values()) > 0
    assert found[0] == found[1]


@pytest.mark.parametrize("executor", ["inline", "worker"])
@pytest.mark.parametrize("name", EXECUTION_MODES)
def test_execution_modes(
    name: str, executor: str, folders: Folders, target: ShardedModel, wanted: dict[str, Outputs]
) -> None:
    for params in PARAMS:
        made = under(engine(target, like(folders), acceptance_method="match"), name, executor)
        assert outputs(made, PARAMS[params]) == wanted[params]
        assert sum(made.metrics().accepted_tokens.values()) > 0 and target.pages.usage == 0
        made.execution_mode.close()


@pytest.mark.parametrize("name", every(POLICIES))
def test_policies(name: str, folders: Folders, target: ShardedModel, wanted: dict[str, Outputs]) -> None:
    made = engine(target, like(folders), policy=name, acceptance_method="match")
    assert outputs(made, PARAMS["seeded"]) == wanted["seeded"]


@pytest.mark.parametrize("routing", ROUTINGS)
@pytest.mark.parametrize("combiner", COMBINERS)
def test_pools(combiner: str, routing: str, folders: Folders, target: ShardedModel, wanted: dict[str, Outputs]) -> None:
    itself = ModelDrafter(load(folders.target))
    members = {"like": like(folders), "copy": NgramDrafter(1, 3), "itself": itself}
    made = engine(target, pool_of(members, combiner, routing, VOCAB), acceptance_method="match")
    assert outputs(made, PARAMS["seeded"]) == wanted["seeded"]
    assert made.metrics().accepted_tokens["itself"] > 0


@pytest.mark.parametrize("name", LOGITS_PROCESSORS)
def test_logits_processors(name: str, folders: Folders, whole: Model, target: ShardedModel) -> None:
    found = [outputs(engine(model, like(folders)), PROCESSED[name]) for model in (whole, target)]
    assert found[0] == found[1] != outputs(engine(whole, None), PLAIN)
