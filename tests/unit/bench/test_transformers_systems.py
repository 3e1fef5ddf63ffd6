"""transformers' own ways of decoding as systems: the same greedy text from each, whole timings, reported failures."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import transformers

from cospec.bench.request_record import Params, Prompt
from cospec.bench.systems import SYSTEMS, System, SystemSpec
from cospec.bench.transformers_systems import Written, chunks_of, cut_at_eos
from cospec.errors import InvalidInput

HALF = "\ufffd"  # a character that was not finished at the end, which some show and some do not
KINDS = [kind for kind in SYSTEMS if kind.startswith("transformers")]
PROMPTS = [Prompt("a", "def f(x):", "code"), Prompt("b", "It was a dark and stormy", "prose"), Prompt("c", "ab ab ab")]


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random Llama of bytes."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    path = tmp_path_factory.mktemp("bytes")
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = Tokenizer(models.BPE({char: id for id, char in enumerate(alphabet)}, []))
    words.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    words.decoder = decoders.ByteLevel()
    transformers.PreTrainedTokenizerFast(tokenizer_object=words).save_pretrained(path)
    torch.manual_seed(3)
    config = transformers.LlamaConfig(
        vocab_size=len(alphabet), hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=128, initializer_range=0.3, bos_token_id=None,
        eos_token_id=None, tie_word_embeddings=False,
    )  # fmt: skip
    transformers.LlamaForCausalLM(config).save_pretrained(path)
    return path


def started(kind: str, folder: Path) -> System:
    options = {"transformers-assisted": f', "assistant": "{folder}"'}.get(kind, "")
    system = SystemSpec.parse(f'x={{"system": "{kind}"{options}}}', str(folder)).build()
    system.start()
    return system


@pytest.fixture(scope="module")
def wanted(folder: Path) -> list[str]:
    """Greedy texts, one prompt at a time, by our own engine."""
    system = SystemSpec.parse('x={"threads": 1, "kv_cache_memory_bytes": 4000000}', str(folder)).build()
    system.start()
    return [system.run([prompt], Params(max_tokens=12))[0].text.rstrip(HALF) for prompt in PROMPTS]


@pytest.mark.parametrize("kind", KINDS)
def test_every_way_writes_the_same_text(kind: str, folder: Path, wanted: list[str]) -> None:
    system = started(kind, folder)
    timings = system.run(PROMPTS, Params(max_tokens=12))
    assert [timing.text.rstrip(HALF) for timing in timings] == wanted
    for timing, prompt in zip(timings, PROMPTS, strict=True):
        assert timing.ok
        assert (timing.id, timing.category, timing.reported_tokens) == (prompt.id, prompt.category, 12)
        assert timing.prompt_tokens == len(prompt.text)
        times = [chunk.at for chunk in timing.chunks]
        assert times == sorted(times)
        assert 0 < times[0] <= times[-1] <= timing.end
    assert system.counters() is None
    again = system.run(PROMPTS[:1], Params(max_tokens=5))
    assert again[0].reported_tokens == 5
    system.stop()


def test_a_seed_repeats_a_sample(folder: Path) -> None:
    system = started("transformers", folder)
    params = [Params(max_tokens=12, temperature=1.0, seed=seed) for seed in (1, 1, 2)]
    first, second, third = (system.run(PROMPTS[:1], one)[0].text for one in params)
    assert first == second != third


def test_prompts_that_do_not_fit_the_cache_are_failures(folder: Path) -> None:
    spec = '{"system": "transformers-continuous", "num_blocks": 1, "page_size": 4, "max_batch_tokens": 8}'
    system = SystemSpec.parse(f"x={spec}", str(folder)).build()
    system.start()
    timings = system.run(PROMPTS, Params(max_tokens=12))
    assert any(not timing.ok for timing in timings)
    system.stop()


def test_an_unknown_option_is_refused_by_name(folder: Path) -> None:
    with pytest.raises(InvalidInput, match=r"system x\.beams"):
        SystemSpec.parse('x={"system": "transformers", "beams": 3}', str(folder)).build()


def test_outputs_end_at_the_end_token() -> None:
    assert cut_at_eos([5, 6, 7], [0.1, 0.2, 0.3], 6) == Written([5, 6], [0.1, 0.2])
    assert cut_at_eos([5, 6, 7], [0.1, 0.2, 0.3], [9, 5]) == Written([5], [0.1])
    assert cut_at_eos([5, 6, 7], [0.1, 0.2, 0.3], None) == Written([5, 6, 7], [0.1, 0.2, 0.3])


class Halves:
    """Token 1 is half a character, a second one completes it."""

    def decode(self, tokens: list[int], skip_special_tokens: bool) -> str:
        text = "".join({0: "a", 1: "?"}[token] for token in tokens).replace("??", "é")
        return text.replace("?", "\ufffd")


def test_chunks_hold_whole_characters() -> None:
    chunks = chunks_of(Halves(), Written([0, 1, 1, 0, 0], [1.0, 2.0, 3.0, 4.0, 4.0]), 0.5)
    assert [(chunk.at, chunk.text) for chunk in chunks] == [(0.5, "a"), (2.5, "é"), (3.5, "aa")]
