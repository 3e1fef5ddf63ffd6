"""The recipes on the page for contributors: each class passes its table's check, and serves."""

from __future__ import annotations

import itertools
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from fastapi.testclient import TestClient

from cospec.assembly.build import assemble, memory_plan_of
from cospec.assembly.components import TextInfo
from cospec.config import EngineConfig, SpeculativeConfig
from cospec.core.engine import Engine
from cospec.core.interfaces import Model
from cospec.core.model_io import SequenceSlice, TokenBatch
from cospec.core.plugin_base import Drafter
from cospec.errors import DrafterLost
from cospec.llm import LLM
from cospec.models.attention.backend import AttentionShape
from cospec.models.hf_tokenizer import tokenizer_of
from cospec.models.kv_cache import LayerBlocks
from cospec.models.loading import LoadOptions, load_model
from cospec.models.toy import ToyModel
from cospec.registry import (
    ACCEPTANCE_METHODS,
    ATTENTION_BACKENDS,
    BLENDS,
    COMBINERS,
    DRAFTERS,
    EXECUTION_MODES,
    EXECUTORS,
    LOGITS_PROCESSORS,
    POLICIES,
    ROUTINGS,
    WEIGHT_FORMATS,
    PluginTable,
)
from cospec.runtime.messages import EngineInfo
from cospec.sampling_params import SamplingParams
from cospec.server.app import create_app
from cospec.server.metrics import ServerMetrics
from cospec.server.service import Service
from cospec.server.settings import ServerSettings
from cospec.text.tokenizer import TextTokenizer
from harness.attention import ATTENTION_LAYERS, ATTENTION_SEGMENTS, SCALE, attention_case, dense_attention
from harness.ensembles import ensemble_engine
from harness.pools import pool_of, toy_drafters
from harness.remote_drafters import recipe_of
from harness.tiny import tiny
from harness.toys import toy_engine
from server.fake_engine import write_tokenizer

PAGE = Path(__file__).parents[2] / "CONTRIBUTING.md"
V = 5
RECIPES: dict[str, tuple[PluginTable[Any], str, str]] = {
    "drafter": (DRAFTERS, "repeat", "RepeatDrafter"),
    "acceptance method": (ACCEPTANCE_METHODS, "first-token", "FirstToken"),
    "logits processor": (LOGITS_PROCESSORS, "no-double", "NoDouble"),
    "policy": (POLICIES, "few-requests", "FewRequests"),
    "blend": (BLENDS, "mean-logits", "MeanLogits"),
    "combiner": (COMBINERS, "heaviest", "Heaviest"),
    "routing": (ROUTINGS, "best", "Best"),
    "execution mode": (EXECUTION_MODES, "together", "Together"),
    "executor": (EXECUTORS, "deferred", "DeferredExecutor"),
    "weight format": (WEIGHT_FORMATS, "ternary", "Ternary"),
    "attention back end": (ATTENTION_BACKENDS, "plain", "PlainAttention"),
}
CODE = re.findall(r"### An? ([\w ]+)\n\n```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), flags=re.DOTALL)


@pytest.fixture(autouse=True)
def registered(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The classes of the page, under their names in the tables."""
    for kind, code in CODE:
        table, name, cls = RECIPES[kind]
        module = ModuleType(f"recipe_{cls}")
        monkeypatch.setitem(sys.modules, module.__name__, module)
        exec(compile(code, str(PAGE), "exec"), module.__dict__)
        table.register(name, module.__dict__[cls])
    yield
    for table, name, _ in RECIPES.values():
        table.unregister(name)


def written(engine: Engine, **params: Any) -> tuple[tuple[int, ...], Any]:
    """Tokens and statistics of one request."""
    (found,) = LLM.from_engine(engine).generate([0, 1], SamplingParams(max_tokens=30, **params))
    return found.outputs[0].token_ids, found.stats


def chosen(drafter: Drafter, **speculative: Any) -> Engine:
    """An engine around toy models with fields of ``SpeculativeConfig``."""
    config = SpeculativeConfig(num_speculative_tokens=3, **speculative)
    return Engine(assemble(ToyModel(V, seed=1), drafter, config, EngineConfig(), TextInfo()))


def repeat() -> Drafter:
    cls = DRAFTERS.load("repeat")
    built: Drafter = cls.build(cls.Options(), None)
    return built


def plain() -> tuple[int, ...]:
    """The seeded output without drafts."""
    return written(toy_engine(ToyModel(V, seed=1), None), seed=4)[0]


def test_every_recipe_is_on_the_page() -> None:
    assert [kind for kind, _ in CODE] == list(RECIPES)


def test_a_drafter() -> None:
    memory, _ = memory_plan_of(
        EngineConfig.build({"model": "zoo", "speculative_config": {"method": "repeat"}, "device": "cpu"})
    )
    assert len(memory.weights) == 1  # the drafter has no model
    tokens, stats = written(toy_engine(ToyModel(V, seed=1), repeat()), seed=4)
    assert tokens == plain()
    assert stats.drafted > 0


def test_an_acceptance_method() -> None:
    tokens, stats = written(chosen(repeat(), acceptance_method="first-token"), seed=4)
    assert tokens == plain()
    assert 0 < stats.accepted <= stats.drafts


def test_a_logits_processor() -> None:
    chosen_processor = {"logits_processors": {"no-double": {"times": 1}}}
    tokens, stats = written(chosen(repeat()), seed=4, **chosen_processor)
    assert tokens == written(toy_engine(ToyModel(V, seed=1), None), seed=4, **chosen_processor)[0]
    assert stats.drafted > 0
    assert longest_run(tokens) == 1 < longest_run(plain())


def longest_run(tokens: Sequence[int]) -> int:
    """How often a token stands in a row, at most."""
    return max(len(list(group)) for _, group in itertools.groupby(tokens))


def test_a_policy() -> None:
    tokens, stats = written(chosen(repeat(), policy="few-requests"), seed=4)
    assert tokens == plain()
    assert stats.drafted > 0
    _, none = written(chosen(repeat(), policy="few-requests", policy_options={"most": 0}), seed=4)
    assert none.drafted == 0


def test_a_blend() -> None:
    models = [ToyModel(V, seed=seed) for seed in (1, 2)]
    (found,) = LLM.from_engine(ensemble_engine(models, {"method": "mean-logits"}, "alternate", 2)).generate([0, 1])
    assert found.distribution == "mean-logits"
    blend = BLENDS.load("mean-logits").build(None, 2)
    rows = [torch.tensor([[1.0, 3.0]]), torch.tensor([[3.0, 3.0]])]
    assert blend.combine(rows).tolist() == [[2.0, 3.0]]


@pytest.mark.parametrize(("combiner", "routing"), [("heaviest", "all"), ("vote", "best")])
def test_a_combiner_and_a_routing(combiner: str, routing: str) -> None:
    pool = pool_of(toy_drafters(V), combiner, routing, V)
    tokens, stats = written(chosen(pool, acceptance_method="match"), seed=4)
    assert tokens == plain()
    assert stats.drafted > 0


def test_an_execution_mode() -> None:
    engine = chosen(repeat(), execution_mode="together")
    tokens, stats = written(engine, seed=4)
    assert tokens == plain()
    assert stats.drafted > 0
    assert engine.execution_mode.info.name == "together"


def test_an_executor() -> None:
    drafter = EXECUTORS.load("deferred").place(recipe_of(repeat))
    for mode in ("pipelined", "draft-ahead", "draft-for-outcomes", "sequential"):
        engine = chosen(drafter, execution_mode=mode, drafter_executor="deferred")
        tokens, stats = written(engine, seed=4)
        assert tokens == plain()
        assert stats.drafted > 0
    executor = drafter.executor
    assert executor is not None and executor.busy > 0
    pending = executor.submit("propose", [], [])
    assert not pending.done()
    drafter.close()
    with pytest.raises(DrafterLost):
        pending.result()


@pytest.mark.parametrize(
    "options", [{}, {"linear_backend": "torch", "attention_backend": "sdpa"}], ids=["auto", "torch"]
)
def test_a_weight_format(options: dict[str, Any], tmp_path: Path) -> None:
    model = tiny("llama")
    model.save_pretrained(tmp_path)
    plain = LoadOptions(device="cpu", kv_cache_dtype="float32", **options)
    found = logits(load_model(str(tmp_path), replace(plain, quantization="ternary")))
    assert not torch.allclose(found, logits(load_model(str(tmp_path), plain)), atol=1e-3)
    format = WEIGHT_FORMATS.load("ternary")()
    for layer in model.modules():
        if isinstance(layer, torch.nn.Linear):
            layer.weight.data = format.read(layer.weight).decode()
    model.save_pretrained(tmp_path)
    decoded = logits(load_model(str(tmp_path), plain))
    torch.testing.assert_close(found, decoded, atol=1e-4, rtol=1e-4)


def logits(model: Model) -> torch.Tensor:
    """Of a short prompt."""
    assert model.pages.allocate("a", 5)
    return model.forward(TokenBatch((SequenceSlice("a", 0, (1, 2, 3, 4, 5)),)))


def test_an_attention_back_end(tmp_path: Path) -> None:
    backend = ATTENTION_BACKENDS.load("plain")()
    for segments, layer in itertools.product((ATTENTION_SEGMENTS, ATTENTION_SEGMENTS[:1]), ATTENTION_LAYERS):
        case = attention_case(segments)
        pages = LayerBlocks(case.k_pages, case.v_pages)
        found = backend.prepare(case.batch)(case.q, case.k, case.v, pages, AttentionShape(SCALE, **layer))
        torch.testing.assert_close(found.double(), dense_attention(case, **layer), atol=1e-5, rtol=1e-5)
    tiny("mistral-window").save_pretrained(tmp_path)
    options = LoadOptions(device="cpu", fused="never")
    wanted = logits(load_model(str(tmp_path), options))
    found = logits(load_model(str(tmp_path), replace(options, attention_backend="plain")))
    torch.testing.assert_close(found, wanted, atol=1e-4, rtol=1e-4)


@dataclass(frozen=True)
class InfoOnly:
    """An engine's client that answers nothing."""

    info: EngineInfo


def test_an_http_endpoint(tmp_path: Path) -> None:
    (code,) = re.findall(r"## Add an HTTP endpoint or field\n\n```python\n(.*?)```", PAGE.read_text(), flags=re.DOTALL)
    module = ModuleType("recipe_endpoint")
    exec(compile(code, str(PAGE), "exec"), module.__dict__)
    tokens = TextTokenizer(tokenizer_of(str(write_tokenizer(tmp_path))), 256, 257)
    client: Any = InfoOnly(EngineInfo("fake", str(tmp_path), 256, 257))
    service = Service(client, tokens, ServerMetrics("fake"), ServerSettings(api_key=("secret",)))
    app = create_app(service)
    module.__dict__["add_count"](app, service)
    http = TestClient(app)
    assert http.post("/count", json={"prompt": "abc"}).status_code == 401
    http.headers["Authorization"] = "Bearer secret"
    assert http.post("/count", json={"prompt": "abc"}).json() == {"count": 3}
    refused = http.post("/count", json={"prompt": 5})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "prompt")
