"""A model that runs in transformers' code, in stages of its own processes, writes the tokens of one process."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import transformers

from cospec.core.plugin_base import Drafter
from cospec.distributed.model import ShardedModel
from cospec.drafters.model import ModelDrafter
from cospec.drafters.ngram import NgramDrafter
from cospec.models.loading import LoadOptions
from harness.llamas import PAGE, VOCAB, llama_engine, load
from harness.sharded_targets import LAYERS, PARAMS, Folders, outputs, requests, sharded
from harness.shards import TargetOfShards
from harness.toys import ScriptedDrafter, run_all, tokens_of

pytestmark = pytest.mark.cluster

SOME_TREE = [3, 9, 27, 4, 12, 36, 5], [-1, -1, 0, 1, 1, 4, 2]


COMMON = {"vocab_size": VOCAB, "bos_token_id": None, "eos_token_id": None, "initializer_range": 0.25}
CONFIGS = {
    "gpt2": transformers.GPT2Config(n_embd=32, n_layer=LAYERS, n_head=4, n_positions=128, **COMMON),
    "starcoder2": transformers.Starcoder2Config(  # its plan divides products with a bias
        hidden_size=32, intermediate_size=64, num_hidden_layers=LAYERS, num_attention_heads=4, num_key_value_heads=2,
        max_position_embeddings=128, **COMMON,
    ),
}  # fmt: skip


@dataclass(frozen=True)
class Case:
    """A model in the layout of its processes."""

    folders: Folders
    stages: int
    ranks: int
    target: ShardedModel

    def wanted(self, params: str) -> dict[str, tuple[int, ...]]:
        """What one process writes, which adds the products of shards in their order."""
        if self.ranks == 1:
            return outputs(load(self.folders.target), None, PARAMS[params])
        shards = TargetOfShards(self.folders.target, self.ranks, LoadOptions(page_size=PAGE), self.target)
        return outputs(shards, None, PARAMS[params])


def write(config: transformers.PreTrainedConfig, folders: Folders) -> None:
    torch.manual_seed(1)
    model = transformers.AutoModelForCausalLM.from_config(config).float().eval()
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            parameter.data += torch.randn(parameter.shape) * 0.1
    model.save_pretrained(folders.target)
    for parameter in model.parameters():
        parameter.data += torch.randn(parameter.shape) * 0.02
    model.save_pretrained(folders.drafter)


LAYOUTS = {"gpt2-pp2": ("gpt2", 2, 1), "starcoder2-tp2": ("starcoder2", 1, 2)}
GRID = {"gpt2-pp4": ("gpt2", 4, 1), "starcoder2-pp2-tp2": ("starcoder2", 2, 2)}  # with ``--grid`` alone


@pytest.fixture(scope="module", params=[*LAYOUTS, *GRID])
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Case]:
    if request.param in GRID and not request.config.getoption("--grid"):
        pytest.skip("--grid runs this layout")
    name, stages, ranks = (LAYOUTS | GRID)[request.param]
    folders = Folders(*(tmp_path_factory.mktemp(part) for part in ("target", "drafter")))
    write(CONFIGS[name], folders)
    with sharded(folders, stages, ranks) as model:
        yield Case(folders, stages, ranks, model)


def drafter_of(name: str, folder: Path) -> Drafter | None:
    made: dict[str, Callable[[], Drafter | None]] = {
        "none": lambda: None,
        "model": lambda: ModelDrafter(load(folder)),
        "ngram": lambda: NgramDrafter(1, 3),
        "tree": lambda: ScriptedDrafter(*SOME_TREE),
    }
    return made[name]()


@pytest.mark.parametrize("drafter", ["none", "model", "ngram", "tree"])
@pytest.mark.parametrize("params", PARAMS)
def test_tokens_are_those_of_one_process(case: Case, params: str, drafter: str) -> None:
    """Drafts, trees and their rollback, and prefixes that requests share."""
    engine = llama_engine(case.target, drafter_of(drafter, case.folders.drafter), k=3, max_nodes=7)
    assert tokens_of(run_all(engine, requests(PARAMS[params]))) == case.wanted(params)
    if drafter == "model":
        assert sum(engine.metrics().accepted_tokens.values()) > 0
    if drafter != "none":  # the stages keep the prefixes of earlier tests
        assert engine.metrics().prefix_cache_hits > 0
    assert case.target.pages.usage == 0
