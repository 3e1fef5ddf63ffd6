"""Drafters with weights of their own: another format than the target's changes drafts and no text."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from cospec.assembly.build import build_components, memory_plan_of
from cospec.assembly.drafters import EngineHost
from cospec.config import EngineConfig
from cospec.core.engine import Engine
from cospec.core.interfaces import Model
from cospec.core.model_io import SequenceSlice, TokenBatch
from cospec.errors import InvalidInput
from cospec.models.loading import LoadOptions, load_model
from cospec.plugin_options import LIKE_TARGET, ModelOptions
from cospec.registry import QUANTIZATION_ALIASES, WEIGHT_FORMATS
from cospec.sampling_params import SamplingParams
from harness.llamas import VOCAB, write_pair
from harness.toys import make_request, run_all, tokens_of

QUANTIZED = [name for name in WEIGHT_FORMATS if WEIGHT_FORMATS.load(name).dtype is None]
FORMATS = f"on a CPU one of {', '.join((*QUANTIZED, *QUANTIZATION_ALIASES))}; otherwise absent."
HEADS = {"method": "heads", "heads": "zoo:heads"}


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Folders of a target and its drafter."""
    folder = tmp_path_factory.mktemp("pair")
    write_pair(folder / "target", folder / "drafter")
    return folder / "target", folder / "drafter"


def config_of(target: Path | str, speculative: Mapping[str, Any], **options: Any) -> EngineConfig:
    common = {"device": "cpu", "measure_at_start": False, "kv_cache_memory_bytes": 1 << 20}
    return EngineConfig.build({"model": str(target), "speculative_config": dict(speculative), **common, **options})


def texts(config: EngineConfig) -> tuple[dict[str, tuple[int, ...]], int]:
    """Greedy tokens of three requests, and the number of draft tokens that were accepted."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("cospec.assembly.build.load_tokenizer", lambda path: None)
        engine = Engine(build_components(config))
    params = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
    prompts = [tuple((7 * n + 3 * i) % VOCAB for i in range(4 + n)) for n in range(3)]
    events = run_all(engine, [make_request(f"r{n}", prompt, params) for n, prompt in enumerate(prompts)])
    accepted = sum(found[-1].stats.accepted for found in events.values() if found[-1].stats is not None)
    engine.close()
    return tokens_of(events), accepted


def formats(config: EngineConfig) -> list[str]:
    return [each.formats for each in memory_plan_of(config)[0].weights]


@pytest.mark.parametrize(
    ("executor", "target", "drafter", "planned"),
    [
        ("process", {"dtype": "bfloat16"}, {"quantization": "int8"}, ["bf16", "int8"]),
        ("thread", {"dtype": "bfloat16"}, {"quantization": "int8"}, ["bf16", "int8"]),
        ("thread", {"dtype": "float32"}, {"dtype": "bfloat16"}, ["fp32", "bf16"]),
        ("thread", {"quantization": "int8"}, {"dtype": "auto"}, ["int8", "fp32"]),
        ("thread", {"dtype": "bfloat16"}, {}, ["bf16", "bf16"]),
    ],
    ids=str,
)
def test_another_format_of_the_drafter_keeps_the_text(
    pair: tuple[Path, Path], executor: str, target: dict[str, Any], drafter: dict[str, Any], planned: list[str]
) -> None:
    speculative = {"method": "draft_model", "model": str(pair[1]), "num_speculative_tokens": 3, **drafter}
    config = config_of(pair[0], {**speculative, "drafter_executor": executor}, **target)
    assert formats(config) == planned
    found, accepted = texts(config)
    assert found == texts(config_of(pair[0], {"method": "off"}, **target))[0]
    assert accepted > 0


def logits(model: Model) -> torch.Tensor:
    assert model.pages.allocate("a", 4)
    return model.forward(TokenBatch((SequenceSlice("a", 0, (1, 2, 3, 4)),)))


def test_the_drafter_computes_in_its_own_format(pair: tuple[Path, Path]) -> None:
    target, drafter = pair
    options = LoadOptions(device="cpu", dtype="bfloat16", cache_bytes=1 << 20)
    host = EngineHost(load_model(str(target), options), target, None, None, options)
    alone = logits(load_model(str(drafter), LoadOptions(device="cpu", quantization="int8", cache_bytes=1 << 20)))
    own = host.load_drafter(str(drafter), ModelOptions(quantization="int8"))
    assert torch.equal(logits(own), alone)
    assert not torch.equal(logits(host.load_drafter(str(drafter), LIKE_TARGET)), alone)


def test_members_of_a_pool_have_formats_of_their_own(pair: tuple[Path, Path]) -> None:
    member = {"method": "draft_model", "model": str(pair[1])}
    members = [{"name": "a", **member}, {"name": "b", **member, "quantization": "int8"}]
    speculative = {"method": "pool", "drafters": members, "num_speculative_tokens": 3}
    config = config_of(pair[0], speculative, dtype="bfloat16")
    assert formats(config) == ["bf16", "bf16", "int8"]
    found, accepted = texts(config)
    assert found == texts(config_of(pair[0], {"method": "off"}, dtype="bfloat16"))[0]
    assert accepted > 0


def test_the_target_in_fewer_bits_drafts_for_itself(pair: tuple[Path, Path]) -> None:
    speculative = {"method": "draft_model", "model": str(pair[0]), "quantization": "int8", "num_speculative_tokens": 3}
    plan, _ = memory_plan_of(config_of(pair[0], speculative, dtype="float32"))
    target, drafter = plan.weights
    assert target.model == drafter.model and (target.formats, drafter.formats) == ("fp32", "int8")
    assert drafter.bytes < 0.4 * target.bytes
    assert plan.bytes == target.bytes + drafter.bytes + plan.token_bytes * plan.kv_cache_tokens
    found, accepted = texts(config_of(pair[0], speculative, dtype="float32"))
    assert found == texts(config_of(pair[0], {"method": "off"}, dtype="float32"))[0]
    assert accepted > 60, "most drafts are the target's own tokens"


@pytest.mark.parametrize("own", [{"quantization": "int8"}, {"dtype": "float32"}], ids=str)
def test_heads_in_another_format_keep_the_text(own: dict[str, str]) -> None:
    found, accepted = texts(config_of("zoo", {**HEADS, "num_speculative_tokens": 2, **own}))
    assert found == texts(config_of("zoo", {"method": "off"}))[0]
    assert accepted > 0


@pytest.mark.parametrize(
    ("own", "sentence"),
    [
        ({"quantization": "int5"}, "speculative_config: quantization is 'int5'; allowed is " + FORMATS),
        (
            {"dtype": "int8"},
            "speculative_config.dtype is 'int8'; allowed is 'auto', 'float32', 'bfloat16' or 'float16'.",
        ),
        ({"quantization": 8}, "speculative_config.quantization is 8; allowed is a text."),
    ],
)
def test_wrong_options_are_one_sentence(pair: tuple[Path, Path], own: dict[str, Any], sentence: str) -> None:
    drafter = {"method": "draft_model", "model": str(pair[1]), **own}
    with pytest.raises(InvalidInput) as caught:
        memory_plan_of(config_of(pair[0], drafter))
    assert str(caught.value) == sentence
    with pytest.raises(InvalidInput, match=r"^speculative_config\.drafters\[0\](\.| 'a': )") as caught:
        memory_plan_of(config_of(pair[0], {"method": "pool", "drafters": [{"name": "a", **drafter}]}))
    assert str(caught.value).endswith(sentence.removeprefix("speculative_config").lstrip(":. "))


def test_wrong_options_of_heads_are_one_sentence() -> None:
    with pytest.raises(InvalidInput, match=r"^speculative_config\.quantization is 'int5'"):
        texts(config_of("zoo", {**HEADS, "quantization": "int5"}))


def test_each_model_has_a_kv_cache_of_its_own_dtype(pair: tuple[Path, Path]) -> None:
    speculative = {"method": "draft_model", "model": str(pair[1]), "num_speculative_tokens": 3}
    plain = memory_plan_of(config_of(pair[0], speculative))[0]
    config = config_of(pair[0], {**speculative, "kv_cache_dtype": "int8"}, kv_cache_dtype="bfloat16")
    plan = memory_plan_of(config)[0]
    assert (plan.cache_dtypes, plain.cache_dtypes) == (("bfloat16", "int8"), ("float32", "float32"))
    assert plan.token_bytes == plain.token_bytes // 4 + 3 * 2 * 2 * (8 + 4)
    found, accepted = texts(config)
    assert found == texts(config_of(pair[0], {"method": "off"}, kv_cache_dtype="bfloat16"))[0]
    assert accepted > 0
    shared = memory_plan_of(config_of(pair[0], speculative, kv_cache_dtype="int8"))[0]
    assert shared.cache_dtypes == ("int8", "int8")


@pytest.mark.parametrize(
    ("weights", "wanted"),
    [
        ({}, "float32"),
        ({"dtype": "bfloat16"}, "bfloat16"),
        ({"dtype": "float16"}, "float16"),
        ({"quantization": "int8"}, "bfloat16"),
    ],
    ids=str,
)
def test_the_dtype_of_a_cache_follows_the_weights(
    pair: tuple[Path, Path], weights: dict[str, str], wanted: str
) -> None:
    assert memory_plan_of(config_of(pair[0], {"method": "off"}, **weights))[0].cache_dtypes == (wanted,)


@pytest.mark.parametrize("own", [{}, {"kv_cache_dtype": "fp8"}], ids=str)
def test_an_unknown_dtype_of_a_cache_is_refused(pair: tuple[Path, Path], own: dict[str, str]) -> None:
    engine = {} if own else {"kv_cache_dtype": "fp8"}
    with pytest.raises(InvalidInput, match=r"'fp8'.*'bfloat16'") as refused:
        memory_plan_of(config_of(pair[0], {"method": "draft_model", "model": str(pair[1]), **own}, **engine))
    assert refused.value.field == ("speculative_config." if own else "") + "kv_cache_dtype"
