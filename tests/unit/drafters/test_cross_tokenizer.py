"""Drafting with another tokenizer: two small ones trained here, and models that know their words."""

from __future__ import annotations

import math
import random

import pytest
import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from cospec.core.types import Commit, DraftBudget, DraftContext
from cospec.drafters.cross_tokenizer import MappedVocab, token_bytes
from cospec.drafters.model import ModelDrafter
from cospec.errors import InvalidInput
from cospec.models.toy import ToyModel
from cospec.rng.random_streams import StreamKind
from cospec.sampling_params import SamplingParams
from harness.enumerated_draws import total_variation
from harness.pools import letters
from harness.reference import joint_distribution_of
from harness.toys import enumerated_distribution, make_request, run_all, tokens_of, toy_engine

ENGLISH = ["the theatre there gathers their other brothers", "a slow thing and another thing thought through"] * 4
GERMAN = ["der Vater der anderen Brüder dachte daran", "ein Ding und noch ein Ding über die Straße"] * 4
GREEDY = SamplingParams(temperature=0)


def id_of(tokenizer: Tokenizer, token: str) -> int:
    found: int | None = tokenizer.token_to_id(token)
    assert found is not None, token
    return found


def trained(texts: list[str], size: int, specials: list[str] | None = None) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=size, special_tokens=specials or [], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def metaspace(texts: list[str], size: int) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()])
    bytes_ = [f"<0x{byte:02X}>" for byte in range(256)]
    trainer = trainers.BpeTrainer(vocab_size=size, special_tokens=["<unk>", *bytes_], show_progress=False)
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


TARGET = trained(ENGLISH, 320, ["<|end|>"])
OWN = trained(ENGLISH + GERMAN, 380, ["<|start|>", "<|end|>"])


def joined(tokenizer: Tokenizer = OWN, own_size: int | None = None) -> MappedVocab:
    return MappedVocab(TARGET, tokenizer, TARGET.get_vocab_size(), own_size or tokenizer.get_vocab_size())


def context(tokens: list[int], id: str = "s", params: SamplingParams = GREEDY) -> DraftContext:
    return DraftContext(id, tokens, 1, params, 3, StreamKind.DRAFT)


def test_words_are_shared_by_their_bytes() -> None:
    vocabulary = joined()
    ours, theirs = token_bytes(OWN), token_bytes(TARGET)
    assert len(vocabulary.shared) > 256
    assert all(theirs[target] == ours[own] for target, own in vocabulary.shared.items())
    assert len(set(vocabulary.shared.values())) == len(vocabulary.shared)
    assert theirs[id_of(TARGET, "Ġthe")] == b" the"
    assert vocabulary.shared[id_of(TARGET, "<|end|>")] == id_of(OWN, "<|end|>")
    limited = joined(own_size=100)
    assert max(limited.shared.values()) < 100


def test_kinds_of_tokenizers_are_compared_by_text() -> None:
    other = metaspace(ENGLISH, 400)
    vocabulary = joined(other)
    assert vocabulary.shared[id_of(TARGET, "Ġthe")] == id_of(other, "▁the")
    text = "the brothers thought"
    read = vocabulary.tokens(context(TARGET.encode(text).ids))
    assert read is not None
    assert other.decode(list(read[0])) == text


def test_rows_move_to_the_targets_ids() -> None:
    vocabulary = joined()
    logits = torch.randn(3, OWN.get_vocab_size())
    found = vocabulary.to_target(logits)
    assert found.shape == (3, TARGET.get_vocab_size())
    for target in range(TARGET.get_vocab_size()):
        own = vocabulary.shared.get(target)
        assert torch.equal(found[:, target], logits[:, own] if own is not None else torch.full((3,), -math.inf))


@pytest.mark.parametrize("seed", range(6))
def test_growing_text_is_read_as_if_at_once(seed: int) -> None:
    """Token by token, in pieces, in the middle of words and characters: in the end the drafter's own cut."""
    chance = random.Random(seed)
    text = " ".join(chance.choice([*ENGLISH, *GERMAN]) for _ in range(6)) + " über."
    tokens, vocabulary, fed = TARGET.encode(text).ids, joined(), list[int]()
    known: list[int] = []
    while known != tokens:
        known += tokens[len(known) : len(known) + chance.randrange(1, 5)]
        if chance.random() < 0.2:
            continue
        read = vocabulary.tokens(context(known))
        if read is None:
            continue
        own, agreed = read
        since = list(own)[:agreed]
        assert since[: len(fed)] == fed[:agreed], "tokens called unchanged were not returned before"
        fed = list(own)
        assert OWN.decode(fed) == TARGET.decode(known)
    assert fed == OWN.encode(text).ids


def test_half_a_character_waits() -> None:
    vocabulary = joined()
    start, umlaut = TARGET.encode("a ").ids, TARGET.encode("ü").ids
    assert len(umlaut) == 2
    assert vocabulary.tokens(context([*start, umlaut[0]])) is None
    read = vocabulary.tokens(context([*start, *umlaut]))
    assert read is not None
    assert OWN.decode(list(read[0])) == "a ü"


def test_the_end_of_a_text_is_healed() -> None:
    """After half a word, the row has the whole words that begin so, and what follows the half."""
    vocabulary = joined()
    words = {word: id for id, word in token_bytes(OWN).items()}
    the, re = words[b" the"], id_of(TARGET, "re")
    assert b" there" in words
    assert re is not None
    before, after = torch.full((OWN.get_vocab_size(),), -30.0), torch.full((OWN.get_vocab_size(),), -30.0)
    before[the], before[words[b" there"]], before[words[b"z"]] = 1.0, 2.0, 5.0
    after[words[b"z"]] = 0.0
    row = vocabulary.map_logits([[words[b"a"], the]], torch.stack([before, after]))
    p = torch.softmax(row[0].double(), -1)
    assert p[re] == pytest.approx(math.exp(2) / (math.exp(1) + math.exp(2)), abs=1e-6)
    assert p[id_of(TARGET, "z")] == pytest.approx(math.exp(1) / (math.exp(1) + math.exp(2)), abs=1e-6)
    alone = vocabulary.map_logits([[the]], after[None])
    assert torch.equal(alone, vocabulary.to_target(after[None]))
    nothing_longer = vocabulary.map_logits([[the, words[b" there"]]], torch.stack([before, after]))
    assert torch.equal(nothing_longer, vocabulary.to_target(after[None]))


def test_special_tokens_are_walls() -> None:
    vocabulary = joined()
    end = id_of(TARGET, "<|end|>")
    tokens = [*TARGET.encode("the the").ids, end, *TARGET.encode("other").ids]
    read = vocabulary.tokens(context(tokens))
    assert read is not None
    assert list(read[0]) == [*OWN.encode("the the").ids, id_of(OWN, "<|end|>"), *OWN.encode("other").ids]


def test_what_was_drafted_and_kept_is_not_fed_again() -> None:
    vocabulary = joined()
    known = TARGET.encode("the other").ids
    first = vocabulary.tokens(context(known))
    assert first is not None
    before = list(first[0])
    more = TARGET.encode(" thing").ids
    second = vocabulary.tokens(context([*known, *more]))
    assert second is not None
    own, agreed = second
    assert list(own) == [*before, *vocabulary.to_own(more)]
    assert agreed == len(own)
    split = TARGET.encode("the oth").ids
    vocabulary.tokens(context(split, "t"))
    third = vocabulary.tokens(context([*split, *TARGET.encode("er").ids], "t"))
    assert third is not None
    assert third[1] < len(third[0]), "the end of the text was cut in another way"


def test_no_shared_word_is_refused() -> None:
    with pytest.raises(InvalidInput, match="none of whose tokens"):
        MappedVocab(TARGET, metaspace(["zz"], 259), 1, 259)


def translated(own: str, seed: int = 5) -> ModelDrafter:
    model = ToyModel(len(own), order=1, seed=seed, sharpness=1.5)
    return ModelDrafter(model, vocabulary=MappedVocab(letters("abc"), letters(own), 3, len(own)))


@pytest.mark.parametrize("own", ["cab", "xbyca", "ba", "cxyz"])
@pytest.mark.parametrize("shape", [{}, {"widths": (2,), "max_nodes": 2}])
def test_a_translated_drafter_keeps_the_distribution(own: str, shape: dict[str, object]) -> None:
    """All of the vocabulary in another order, more than it, and a part of it."""
    target = ToyModel(3, order=2, seed=1)
    params = SamplingParams(max_tokens=8, temperature=0.8, repetition_penalty=1.3)
    for acceptance_method in ["recursive"] if shape else ["recursive", "block"]:
        engine = toy_engine(target, translated(own), acceptance_method, 1, **shape)
        found = enumerated_distribution(engine, (0, 1, 0), params, 3)
        assert total_variation(found, joint_distribution_of(target, params, (0, 1, 0), 3)) < 1e-12
        assert engine.metrics().draft_tokens or own == "cxyz"


def test_the_same_model_under_other_ids_agrees() -> None:
    """The target's own table with its letters renamed proposes what the target writes."""
    target, params = ToyModel(3, order=2, seed=1), SamplingParams(temperature=0, max_tokens=30)
    renamed = ToyModel(3, order=2, seed=1)
    order = torch.tensor([2, 0, 1, 3])  # "cab" and no token
    renamed.table = target.table[order][:, order][:, :, order[:3]]
    drafter = ModelDrafter(renamed, vocabulary=MappedVocab(letters("abc"), letters("cab"), 3, 3))
    engine = toy_engine(target, drafter, "match", 3)
    requests = [make_request(f"r{n}", (n, 1, 2), params) for n in range(3)]
    plain = tokens_of(run_all(toy_engine(target, None), requests))
    assert tokens_of(run_all(engine, requests)) == plain
    metrics = engine.metrics()
    assert sum(metrics.accepted_tokens.values()) == sum(metrics.draft_tokens.values()) > 50


def test_it_catches_up_after_any_commit() -> None:
    """What it proposes is what a drafter that never saw the sequence would."""
    size = OWN.get_vocab_size()
    chance = random.Random(1)
    model = ToyModel(size, order=1, seed=2)
    drafter = ModelDrafter(model, vocabulary=joined())
    text = TARGET.encode(ENGLISH[0]).ids
    for _ in range(25):
        (draft,) = drafter.propose([context(text)], [DraftBudget(3, 3)])
        fresh = ModelDrafter(ToyModel(size, order=1, seed=2), vocabulary=joined())
        (wanted,) = fresh.propose([context(text)], [DraftBudget(3, 3)])
        assert draft.tokens == wanted.tokens
        kept = chance.randrange(4)
        gained = (*draft.tokens[:kept], *chance.choice([TARGET.encode(" the").ids, TARGET.encode("rs").ids])[:1])
        drafter.commit([Commit("s", len(text), gained, tuple(range(kept)), 0)])
        text = [*text, *gained]
    drafter.free(["s"])
    assert model.pages.usage == 0


def test_added_words_are_text() -> None:
    tokenizer = trained(ENGLISH, 300)
    tokenizer.add_tokens([AddedToken("gather", special=False)])
    assert token_bytes(tokenizer)[id_of(tokenizer, "gather")] == b"gather"
