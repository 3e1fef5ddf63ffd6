"""Tokenizers from GGUF metadata give the ids and the text of the tokenizers that they were written from."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import pytest
from gguf.constants import TokenType
from tokenizers import AddedToken, Tokenizer, normalizers, pre_tokenizers
from tokenizers.models import WordLevel

from cospec.errors import ModelError
from cospec.models.files.gguf_file import GgufFile
from cospec.models.files.gguf_tokenizer import PRE_TOKENIZERS, GgufTokenizer, read_tokenizer
from cospec.models.files.gguf_tokenizer_writer import TokenizerWriter
from cospec.models.loading import load_tokenizer
from cospec.models.model_folder import ZOO, zoo_members
from harness.gguf_files import write_tokenizer
from harness.small_tokenizers import in_folder, sentencepiece

TEXTS = (
    "It was the best of times, it was the worst of times.",
    "  def f(x):\n\n\treturn {'a': 1234567890}  # don't\r\n",
    "naïve café — 日本語 🙂 ▁ x\u0301 \u00a0",
    "<|endoftext|>a<|endoftext|> <s>b</s> <start_of_turn>",
    "",
    " ",
    "a" * 50 + "\n" * 7,
)
MEMBERS = [name for name in zoo_members() if (ZOO / name / "tokenizer.json").exists()]


def read(writer: Any, path: Path) -> GgufTokenizer:
    for write in (writer.write_header_to_file, writer.write_kv_data_to_file, writer.write_tensors_to_file):
        write()
    writer.close()
    return read_tokenizer(GgufFile.open(path))


def same(found: Tokenizer, wanted: Tokenizer) -> None:
    for text in TEXTS:
        ids = wanted.encode(text).ids
        assert found.encode(text).ids == ids, text
        assert found.encode(text, add_special_tokens=False).ids == wanted.encode(text, add_special_tokens=False).ids
        for skip in (True, False):
            assert found.decode(ids, skip_special_tokens=skip) == wanted.decode(ids, skip_special_tokens=skip)


@pytest.mark.parametrize("member", MEMBERS)
def test_tokenizers_of_the_zoo(tmp_path: Path, member: str) -> None:
    tokenizer = load_tokenizer(ZOO / member)
    writer = gguf.GGUFWriter(tmp_path / "a.gguf", "llama")
    write_tokenizer(writer, tokenizer)
    found = read(writer, tmp_path / "a.gguf")
    same(found.tokenizer, tokenizer.backend_tokenizer)
    assert found.chat_template == tokenizer.chat_template
    assert found.eos_ids == (tokenizer.eos_token_id,)


def test_missing_merges_give_other_ids(tmp_path: Path) -> None:
    """Negative control: the texts need the last merges of the vocabulary."""
    tokenizer = load_tokenizer(ZOO / MEMBERS[0])
    writer = gguf.GGUFWriter(tmp_path / "a.gguf", "llama")
    write_tokenizer(writer, tokenizer, merges=2000)
    with pytest.raises(AssertionError):
        same(read(writer, tmp_path / "a.gguf").tokenizer, tokenizer.backend_tokenizer)


@pytest.mark.parametrize("prefix", [True, False])
@pytest.mark.parametrize("with_merges", [True, False])
def test_sentencepiece(tmp_path: Path, prefix: bool, with_merges: bool) -> None:
    tokenizer, tokens, special = sentencepiece(prefix)
    kinds = [TokenType.UNKNOWN, TokenType.CONTROL, TokenType.CONTROL] + [TokenType.BYTE] * 256
    kinds += [TokenType.NORMAL] * (len(tokens) - special)
    merges = [m if isinstance(m, str) else " ".join(m) for m in json.loads(tokenizer.to_str())["model"]["merges"]]
    rank = {merge.replace(" ", ""): -float(place) for place, merge in reversed(list(enumerate(merges)))}
    writer = gguf.GGUFWriter(tmp_path / "a.gguf", "llama")
    writer.add_tokenizer_model("llama")
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    if with_merges:
        writer.add_token_merges(merges)
    else:
        writer.add_token_scores([rank.get(token, -1e6) for token in tokens])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_add_bos_token(False)
    writer.add_add_space_prefix(prefix)
    same(read(writer, tmp_path / "a.gguf").tokenizer, tokenizer)


def written(path: Path, folder: Path, vocab_size: int) -> GgufTokenizer:
    writer = gguf.GGUFWriter(path, "llama")
    own = TokenizerWriter(folder, vocab_size)
    own.write(writer)
    found = read(writer, path)
    own.check(GgufFile.open(path))
    return found


@pytest.mark.parametrize("member", MEMBERS)
def test_written_tokenizers_of_the_zoo(tmp_path: Path, member: str) -> None:
    found = written(tmp_path / "a.gguf", ZOO / member, 5000)
    wanted = load_tokenizer(ZOO / member)
    same(found.tokenizer, wanted.backend_tokenizer)
    assert found.tokenizer.get_vocab_size() == 5000, "llama.cpp wants a token for each row of the embedding"
    assert (found.chat_template, found.eos_ids) == (wanted.chat_template, (wanted.eos_token_id,))


SPECIAL = {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>"}


@pytest.mark.parametrize("prefix", [True, False])
def test_written_sentencepiece(tmp_path: Path, prefix: bool) -> None:
    tokenizer, tokens, _ = sentencepiece(prefix)
    folder = in_folder(tmp_path / "model", tokenizer, SPECIAL)
    found = written(tmp_path / "a.gguf", folder, len(tokens))
    same(found.tokenizer, load_tokenizer(folder).backend_tokenizer)
    assert found.eos_ids == (2,)


def test_tokens_without_a_row_of_the_embedding_are_left_out(tmp_path: Path) -> None:
    """Gemma 3 of 1B has such a token. llama.cpp loads no file with more tokens than rows."""
    tokenizer, tokens, _ = sentencepiece(True)
    tokenizer.add_special_tokens(["<image>"])
    found = written(tmp_path / "a.gguf", in_folder(tmp_path / "model", tokenizer, SPECIAL), len(tokens))
    assert found.tokenizer.get_vocab_size() == len(tokens)


@pytest.mark.parametrize(("ends", "file"), [([2, 300, 301], "generation_config.json"), (300, "config.json")])
def test_other_ends_are_written(tmp_path: Path, ends: int | list[int], file: str) -> None:
    tokenizer, tokens, _ = sentencepiece(True)
    folder = in_folder(tmp_path / "model", tokenizer, SPECIAL)
    (folder / file).write_text(json.dumps({"eos_token_id": ends, "model_type": "llama"}))
    expected = {2, *(ends if isinstance(ends, list) else [ends])}
    assert set(written(tmp_path / "a.gguf", folder, len(tokens)).eos_ids) == expected
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [300, 301, 302]}))
    with pytest.raises(ModelError, match=r"ends outputs with the tokens \[302\] too"):
        written(tmp_path / "b.gguf", folder, len(tokens))


def test_templates_with_names(tmp_path: Path) -> None:
    tokenizer, tokens, _ = sentencepiece(True)
    folder = in_folder(tmp_path / "model", tokenizer, SPECIAL)
    file = folder / "tokenizer_config.json"
    templates = [{"name": "default", "template": "{{ a }}"}, {"name": "tool_use", "template": "{{ b }}"}]
    file.write_text(json.dumps(json.loads(file.read_text()) | {"chat_template": templates}))
    assert written(tmp_path / "a.gguf", folder, len(tokens)).chat_template == "{{ a }}"


def test_white_space_after_added_tokens(tmp_path: Path) -> None:
    """Phi 3 has tokens after which white space is dropped. llama.cpp knows them by the name of the model."""
    tokenizer, tokens, _ = sentencepiece(True)
    added = [AddedToken(text, normalized=False, special=True, rstrip=True) for text in ("<|user|>", "<|end|>")]
    tokenizer.add_special_tokens([*added, AddedToken("</s>", normalized=False, special=True, rstrip=True)])
    folder = in_folder(tmp_path / "model", tokenizer, SPECIAL)
    found = written(tmp_path / "a.gguf", folder, len(tokens) + 2).tokenizer
    text = "<s><|user|>\n a b<|end|>\n"
    assert found.encode(text).ids == load_tokenizer(folder).backend_tokenizer.encode(text).ids
    assert found.encode("<|user|>\n a").ids == found.encode("<|user|>a").ids
    other = sentencepiece(True)[0]
    other.add_special_tokens([AddedToken("<|mask|>", normalized=False, special=True, lstrip=True)])
    with pytest.raises(ModelError, match=r"has the tokens <\|mask\|> with lstrip"):
        written(tmp_path / "b.gguf", in_folder(tmp_path / "mask", other, SPECIAL), len(tokens) + 1)


def test_olmo_composes_characters(tmp_path: Path) -> None:
    trained = load_tokenizer(ZOO / MEMBERS[0]).backend_tokenizer
    trained.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trained.normalizer = normalizers.NFC()
    folder = in_folder(tmp_path / "model", trained, {"eos_token": "<|endoftext|>"})
    same(written(tmp_path / "a.gguf", folder, trained.get_vocab_size()).tokenizer, trained)
    assert GgufFile.open(tmp_path / "a.gguf").metadata["tokenizer.ggml.pre"] == "olmo"


def test_tokenizers_that_a_file_cannot_hold(tmp_path: Path) -> None:
    tokenizer, tokens, _ = sentencepiece(True)
    tokenizer.normalizer = normalizers.Sequence([normalizers.Lowercase(), tokenizer.normalizer])
    with pytest.raises(ModelError, match="allowed in a GGUF file are"):
        written(tmp_path / "a.gguf", in_folder(tmp_path / "model", tokenizer, SPECIAL), len(tokens))
    words = in_folder(tmp_path / "words", Tokenizer(WordLevel({"a": 0, "b": 1}, unk_token="a")), {"unk_token": "a"})
    with pytest.raises(ModelError, match="is of type WordLevel; allowed is BPE"):
        TokenizerWriter(words, 2)
    cut = load_tokenizer(ZOO / MEMBERS[0]).backend_tokenizer
    cut.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Punctuation(), cut.pre_tokenizer])
    folder = in_folder(tmp_path / "cut", cut, {"eos_token": "<|endoftext|>"})
    with pytest.raises(ModelError, match="has a pre-tokenizer without a name in GGUF files; allowed are gpt-2"):
        written(tmp_path / "b.gguf", folder, cut.get_vocab_size())


@pytest.mark.parametrize(
    ("given", "ids"), [({}, [1]), ({"add_bos_token": False}, []), ({"add_eos_token": True}, [1, 2])]
)
def test_start_and_end_of_a_text(tmp_path: Path, given: dict[str, bool], ids: list[int]) -> None:
    writer = gguf.GGUFWriter(tmp_path / "a.gguf", "llama")
    writer.add_tokenizer_model("llama")
    writer.add_token_list(["<unk>", "<s>", "</s>", "▁", "a"])
    writer.add_token_types([2, 3, 3, 1, 1])
    writer.add_token_scores([0.0, 0.0, 0.0, -1.0, -2.0])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    for name, value in given.items():
        getattr(writer, f"add_{name}")(value)
    tokenizer = read(writer, tmp_path / "a.gguf").tokenizer
    text = tokenizer.encode("a")
    assert [id for id in text.ids if id in (1, 2)] == ids
    assert tokenizer.encode("a", add_special_tokens=False).ids == [3, 4]
    pair = tokenizer.encode("a", "a").ids
    assert pair[: len(ids[:1])] == ids[:1] and pair.count(4) == 2


def test_added_tokens_stay_whole(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "a.gguf", "qwen2")
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list(["a", "b", "ab", "<|im_end|>", "<think>"])
    writer.add_token_merges(["a b"])
    writer.add_token_types([1, 1, 1, 3, 4])
    writer.add_eos_token_id(3)
    found = read(writer, tmp_path / "a.gguf")
    assert found.tokenizer.encode("ab<|im_end|>a<think>").ids == [2, 3, 0, 4]
    assert found.tokenizer.decode([2, 3, 4], skip_special_tokens=True) == "ab<think>"
    assert found.eos_ids == (3,)


@pytest.mark.parametrize("name", PRE_TOKENIZERS)
def test_every_pre_tokenizer_keeps_the_text(tmp_path: Path, name: str) -> None:
    """All pieces together are the text, for a vocabulary of single bytes."""
    tokens = sorted(Tokenizer.from_file(str(ZOO / MEMBERS[0] / "tokenizer.json")).get_vocab())
    writer = gguf.GGUFWriter(tmp_path / "a.gguf", "llama")
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(name)
    writer.add_token_list([token for token in tokens if len(token) == 1])
    writer.add_token_types([1] * sum(len(token) == 1 for token in tokens))
    tokenizer = read(writer, tmp_path / "a.gguf").tokenizer
    for text in TEXTS[:2]:
        assert tokenizer.decode(tokenizer.encode(text).ids) == text


@pytest.mark.parametrize(
    ("model", "pre", "problem"), [("bert", "x", "type bert"), ("gpt2", "odd", "pre-tokenizer odd")]
)
def test_unknown_tokenizers_are_named(tmp_path: Path, model: str, pre: str, problem: str) -> None:
    writer = gguf.GGUFWriter(tmp_path / "a.gguf", "llama")
    writer.add_tokenizer_model(model)
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(["a"])
    with pytest.raises(ModelError, match=problem):
        read(writer, tmp_path / "a.gguf")
