"""Models of an ensemble with weights of their own: each computes in its format, and proposals change no text."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from cospec.assembly.build import build_components
from cospec.config import EngineConfig
from cospec.core.engine import Engine
from cospec.core.interfaces import Model
from cospec.core.model_io import SequenceSlice, TokenBatch
from cospec.errors import InvalidInput
from cospec.models.loading import LoadOptions, load_model
from cospec.runtime.codec import Codec
from cospec.sampling_params import SamplingParams
from harness.llamas import VOCAB, write_pair
from harness.toys import make_request, run_all, tokens_of

COMMON = {"device": "cpu", "measure_at_start": False, "kv_cache_memory_bytes": 1 << 20}


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """Folders of two models with one vocabulary."""
    folder = tmp_path_factory.mktemp("pair")
    write_pair(folder / "first", folder / "second")
    return str(folder / "first"), str(folder / "second")


def engine_of(models: list[Any], proposal: str, ensemble: dict[str, Any]) -> Engine:
    given = {"models": models, "dtype": "float32", "ensemble": ensemble, "collaboration": {"proposal": proposal}}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("cospec.assembly.build.load_tokenizer", lambda path: None)
        return Engine(build_components(EngineConfig.build({**COMMON, **given})))


def written(engine: Engine) -> dict[str, tuple[int, ...]]:
    """Greedy and seeded texts."""
    params = [SamplingParams(temperature=0.8 * n, seed=n, max_tokens=16, ignore_eos=True) for n in range(2)]
    prompts = [tuple((7 * n + 3 * i) % VOCAB for i in range(4 + n)) for n in range(2)]
    found = tokens_of(run_all(engine, [make_request(f"r{n}", prompts[n], params[n]) for n in range(2)]))
    engine.close()
    return found


def logits(model: Model) -> torch.Tensor:
    assert model.pages.allocate("a", 4)
    return model.forward(TokenBatch((SequenceSlice("a", 0, (1, 2, 3, 4)),)))


def test_a_member_computes_in_its_own_format(pair: tuple[str, str]) -> None:
    engine = engine_of([{"model": pair[1], "quantization": "int8"}, pair[0]], "standard", {"method": "weighted"})
    found = logits(engine.parts.model)
    engine.close()
    alone = (LoadOptions(device="cpu", quantization=kind, cache_bytes=1 << 20) for kind in ("int8", None))
    same, other = (logits(load_model(pair[1], options)) for options in alone)
    assert torch.equal(found, same) and not torch.equal(found, other)


def test_proposals_of_members_in_several_formats_keep_the_text(pair: tuple[str, str]) -> None:
    models = [pair[0], {"model": pair[1], "dtype": "bfloat16"}, {"model": pair[1], "quantization": "int8"}]
    ensemble = {"method": "weighted"}
    plain = written(engine_of(models, "standard", ensemble))
    assert written(engine_of(models, "alternate", ensemble))["r0"] == plain["r0"]
    assert plain != written(engine_of([pair[0], pair[1], pair[1]], "standard", ensemble))


def test_members_reach_the_engine_process() -> None:
    config = EngineConfig.build(
        {"models": ["a", {"model": "b", "quantization": "int8"}], "ensemble": {"method": "weighted"}}
    )
    codec = Codec(EngineConfig)
    assert codec.decode(codec.encode(config)) == config
    assert config.models is not None and (config.model, config.served_model_name) == ("a", "a+b")
    assert [(each.model, each.quantization, each.given) for each in config.models] == [
        ("a", None, False),
        ("b", "int8", True),
    ]


@pytest.mark.parametrize(
    ("member", "named"),
    [
        ({"model": "b", "dtype": "int3"}, r"^models\[1\]\.dtype is 'int3'; allowed is "),
        ({"dtype": "auto"}, r"^models\[1\]\.model is missing"),
        ({"model": "b", "bits": 4}, r"^key models\[1\]\.bits is 4; allowed is one of "),
        (3, r"^models\[1\] is 3; allowed is the name of a model, or an object with model\."),
    ],
)
def test_wrong_members_are_named(member: Any, named: str) -> None:
    with pytest.raises(InvalidInput, match=named):
        EngineConfig.build({"models": ["a", member]})


def test_an_unknown_quantization_names_its_member(pair: tuple[str, str]) -> None:
    with pytest.raises(InvalidInput, match=r"models\[1\].*quantization is 'int3'") as raised:
        engine_of([pair[0], {"model": pair[1], "quantization": "int3"}], "standard", {"method": "weighted"})
    assert raised.value.field == "quantization"


def test_folders_are_models(tmp_path: Path) -> None:
    config = EngineConfig.build({"models": [tmp_path, "b"], "ensemble": {"method": "weighted"}})
    assert config.models is not None and config.models[0].model == str(tmp_path)
