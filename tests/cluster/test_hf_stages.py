"""A model that runs in transformers' code, in stages of its own processes, writes the tokens of one process."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import transformers

from cospec.core.plugin_base import Drafter
from cospec.distributed.model import ShardedModel
from cospec.drafters.model import ModelDrafter
from cospec.drafters.ngram import NgramDrafter
from harness.llamas import VOCAB, llama_engine, load
from harness.sharded_targets import LAYERS, PARAMS, Folders, outputs, requests, sharded
from harness.toys import ScriptedDrafter, run_all, tokens_of

pytestmark = pytest.mark.cluster

SOME_TREE = [3, 9, 27, 4, 12, 36, 5], [-1, -1, 0, 1, 1, 4, 2]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Folders:
    found = Folders(*(tmp_path_factory.mktemp(name) for name in ("target", "drafter")))
    config = transformers.GPT2Config(
        vocab_size=VOCAB, n_embd=32, n_layer=LAYERS, n_head=4, n_positions=128, initializer_range=0.25,
        bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    torch.manual_seed(1)
    model = transformers.GPT2LMHeadModel(config).float().eval()
    model.save_pretrained(found.target)
    for parameter in model.parameters():
        parameter.data += torch.randn(parameter.shape) * 0.02
    model.save_pretrained(found.drafter)
    return found


@pytest.fixture(scope="module")
def target(folders: Folders) -> Iterator[ShardedModel]:
    with sharded(folders, 2) as model:
        yield model


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
def test_tokens_are_those_of_one_process(folders: Folders, target: ShardedModel, params: str, drafter: str) -> None:
    """Drafts, trees and their rollback, and prefixes that requests share."""
    wanted = outputs(load(folders.target), None, PARAMS[params])
    engine = llama_engine(target, drafter_of(drafter, folders.drafter), k=3, max_nodes=7)
    assert tokens_of(run_all(engine, requests(PARAMS[params]))) == wanted
    if drafter == "model":
        assert sum(engine.metrics().accepted_tokens.values()) > 0
    if drafter != "none":  # the stages keep the prefixes of earlier tests
        assert engine.metrics().prefix_cache_hits > 0
    assert target.pages.usage == 0
