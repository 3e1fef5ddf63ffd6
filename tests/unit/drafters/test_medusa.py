"""Medusa heads: the trees they make, what they guess from, and that greedy output stays the target's own."""

from __future__ import annotations

import itertools
import json
import shutil
from pathlib import Path

import pytest
import torch

from cospec import LLM, SamplingParams, SpeculationParams
from cospec.core.tree import depths
from cospec.core.types import Commit, DraftBudget, DraftContext
from cospec.drafters.medusa import MedusaDrafter, level_paths, sparse_paths
from cospec.errors import InvalidInput, ModelError
from cospec.models.medusa_heads import MedusaHeads, MedusaModule, MedusaRunner, output_embedding
from cospec.models.model_folder import resolve
from cospec.rng.random_streams import StreamKind

HIDDEN, VOCAB, COUNT = 16, 24, 3
ACCURACY = ((0.6, 0.2, 0.1), (0.4, 0.2, 0.1), (0.3, 0.1, 0.05))


def made(seed: int = 0, count: int = COUNT, hidden: int = HIDDEN) -> MedusaHeads:
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(count, hidden, hidden, generator=generator) * 0.3
    return MedusaHeads(weight, torch.randn(count, hidden, generator=generator) * 0.1, ACCURACY[:count])


def embedding(seed: int = 1) -> torch.Tensor:
    return torch.randn(VOCAB, HIDDEN, generator=torch.Generator().manual_seed(seed)).bfloat16().float()


def drafter() -> MedusaDrafter:
    return MedusaDrafter(MedusaRunner(made(), embedding(), torch.device("cpu")), ACCURACY)


def context(tokens: list[int], temperature: float = 0.0, stream_kind: StreamKind = StreamKind.TARGET) -> DraftContext:
    return DraftContext("s", tokens, 2, SamplingParams(temperature=temperature), 7, stream_kind)


def test_level_trees_have_the_widths_they_were_given() -> None:
    paths = level_paths((2, 3), 64)
    assert len(paths) == 2 + 6
    assert {len(path) for path in paths} == {1, 2}
    assert level_paths((2, 3), 4) == paths[:4]


@pytest.mark.parametrize("nodes", [1, 2, 5, 9, 20])
def test_a_sparse_tree_is_the_best_of_all_trees_of_its_size(nodes: int) -> None:
    def value(path: tuple[int, ...]) -> float:
        product = 1.0
        for head, rank in enumerate(path):
            product *= ACCURACY[head][rank]
        return product

    everything = [p for depth in (1, 2, 3) for p in itertools.product(range(3), repeat=depth)]
    best = sorted((value(path) for path in everything), reverse=True)[:nodes]
    found = sparse_paths(ACCURACY, 3, nodes)
    assert len(found) == len(set(found)) == nodes
    assert sum(map(value, found)) == pytest.approx(sum(best), rel=1e-12)
    assert all(len(path) == 1 or path[:-1] in found[:place] for place, path in enumerate(found)), "parents come first"


def test_a_head_guesses_from_the_newest_state_and_only_from_it() -> None:
    heads, state = drafter(), torch.randn(HIDDEN, generator=torch.Generator().manual_seed(3))
    tokens = [1, 2, 3]
    assert heads.propose([context(tokens)], [DraftBudget(3, 3)]) == [], "nothing is known before the first commit"
    heads.commit([Commit("s", 2, (3,), (), 2, hidden_state=state)])
    (draft,) = heads.propose([context(tokens)], [DraftBudget(3, 3)])
    weights = made()
    for place in range(COUNT):
        block = weights.weight[place].bfloat16().float() @ state.bfloat16().float() + weights.bias[place]
        wanted = (state + torch.nn.functional.silu(block)).bfloat16().float() @ embedding().T
        assert draft.tokens[place] == int(wanted.argmax())
    assert draft.parents == (-1, 0, 1)
    assert heads.propose([context([*tokens, 4])], [DraftBudget(3, 3)]) == [], "the state is one token old"
    heads.free(["s"])
    assert heads.propose([context(tokens)], [DraftBudget(3, 3)]) == []


@pytest.mark.parametrize(("budget", "nodes", "deep"), [
    (DraftBudget(3, 7, widths=(2, 2, 1)), 7, 3), (DraftBudget(2, 6), 6, 2),
    (DraftBudget(8, 8), 3, 3), (DraftBudget(1, 1), 1, 1),
])  # fmt: skip
def test_trees_keep_to_the_budget(budget: DraftBudget, nodes: int, deep: int) -> None:
    heads = drafter()
    heads.commit([Commit("s", 2, (3,), (), 2, hidden_state=torch.ones(HIDDEN))])
    (draft,) = heads.propose([context([1, 2, 3])], [budget])
    assert len(draft) == nodes
    assert max(depths(draft.parents)) == deep
    for node in range(-1, len(draft)):
        offered = [draft.tokens[child] for child, parent in enumerate(draft.parents) if parent == node]
        assert len(set(offered)) == len(offered), "siblings differ"
    assert draft.confidence is not None and len(draft.confidence) == nodes


def test_heads_are_saved_and_refused_when_they_are_none(tmp_path: Path) -> None:
    made().save(tmp_path / "heads")
    again = MedusaHeads.load(tmp_path / "heads")
    assert again.accuracy == ACCURACY
    assert torch.equal(again.weight, made().weight.bfloat16().float())
    (tmp_path / "heads" / "heads.json").write_text("{}", encoding="utf-8")
    with pytest.raises(ModelError, match="has no heads"):
        MedusaHeads.load(tmp_path / "heads")
    with pytest.raises(ModelError, match="has no heads"):
        MedusaHeads.load(tmp_path / "nowhere")


def test_untrained_heads_repeat_the_target() -> None:
    module, states = MedusaModule(2, HIDDEN), torch.randn(5, HIDDEN)
    assert torch.equal(module(states, 1), states)


@pytest.fixture(scope="module")
def zoo_heads(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Heads of the zoo target's width that know nothing."""
    folder = tmp_path_factory.mktemp("heads")
    width = output_embedding(resolve("zoo")).shape[1]
    weight = torch.randn(3, width, width, generator=torch.Generator().manual_seed(0)) * 0.01
    MedusaHeads(weight, torch.zeros(3, width), ACCURACY).save(folder)
    return folder


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("fused", [True, False])
def test_heads_do_not_change_what_is_written(zoo_heads: Path, temperature: float, fused: bool) -> None:
    sampling = SamplingParams(temperature=temperature, seed=3, max_tokens=20)
    prompts = ["def add(a, b):\n", "It was a cold morning when"]
    speculative = {"method": "heads", "heads": str(zoo_heads), "num_speculative_tokens": 3}
    backend = {} if fused else {"attention_backend": "sdpa", "linear_backend": "torch", "dtype": "float32"}
    plain = LLM(speculative_config={"method": "off"}, **backend).generate(prompts, sampling)
    spoken = LLM(speculative_config=speculative, **backend).generate(prompts, sampling)
    assert [one.outputs[0].token_ids for one in spoken] == [one.outputs[0].token_ids for one in plain]
    assert all(one.stats.drafted > 0 for one in spoken)


@pytest.mark.parametrize(("combiner", "temperature"), [("fuse", 0.0), ("union", 1.0), ("mix", 1.0)])
def test_heads_speak_in_a_pool(zoo_heads: Path, combiner: str, temperature: float) -> None:
    """They get the target's states there too, and change nothing of what is written."""
    sampling = SamplingParams(temperature=temperature, seed=3, max_tokens=16)
    prompts = ["def add(a, b):\n", "It was a cold morning when"]
    members = [
        {"name": "heads", "method": "heads", "heads": str(zoo_heads)},
        {"name": "copy", "method": "ngram", "prompt_lookup_min": 1},
    ]
    pool = {"method": "pool", "combiner": combiner, "drafters": members, "num_speculative_tokens": 3, "max_nodes": 6}
    llm = LLM(speculative_config=pool)
    spoken = llm.generate(prompts, sampling)
    plain = llm.generate(prompts, sampling, SpeculationParams(enabled=False))
    assert [one.outputs[0].token_ids for one in spoken] == [one.outputs[0].token_ids for one in plain]
    assert llm.engine.metrics().draft_tokens["heads"] > 16
    drafter = llm.engine.execution_mode.components.drafter
    assert drafter is not None and drafter.reads_hidden_states


def test_bad_heads_are_one_sentence(tmp_path: Path) -> None:
    made().save(tmp_path)
    with pytest.raises(InvalidInput, match="states have 16 entries"):
        LLM(speculative_config={"method": "heads", "heads": str(tmp_path)})
    shutil.copytree(resolve("zoo"), tmp_path / "model")
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    assert config["tie_word_embeddings"]
    with pytest.raises(InvalidInput, match=r"speculative_config.heads is missing"):
        LLM(model=str(tmp_path / "model"), speculative_config={"method": "heads"})
