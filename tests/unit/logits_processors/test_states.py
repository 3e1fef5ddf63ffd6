"""States of logits processors along committed tokens and draft paths, and the masks that follow from the states."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cospec.core.plugin_base import LogitsProcessor
from cospec.core.sampling import History, edit
from cospec.core.types import DraftContext
from cospec.errors import InvalidInput
from cospec.logits_processors.bitmask import allow, allow_all, ban, num_words, unpack
from cospec.logits_processors.states import RequestProcessors
from cospec.registry import LOGITS_PROCESSORS
from cospec.rng.random_streams import StreamKind
from cospec.runtime.messages import ContextDecoder, ContextEncoder
from cospec.sampling_params import SamplingParams
from cospec.text.input_processor import InputProcessor
from harness.processors import NoOptions, registered
from harness.toys import make_request

V = 70
PARAMS = SamplingParams(
    presence_penalty=0.5,
    repetition_penalty=1.3,
    logit_bias={3: 1.0},
    min_tokens=4,
    stop_token_ids=(2,),
    bad_words_token_ids=((1, 2), (3,)),
    logits_processors={"no-repeat": {}, "prefers-sum": {"scale": 2.0}},
)


@pytest.fixture(autouse=True)
def known() -> Iterator[None]:
    with registered():
        yield


@given(vocab=st.integers(1, 130), data=st.data())
def test_bits_are_tokens(vocab: int, data: st.DataObject) -> None:
    tokens = data.draw(st.sets(st.integers(0, vocab - 1)))
    allowed = unpack(allow(tokens, vocab), vocab)
    assert set(np.flatnonzero(allowed).tolist()) == tokens
    assert np.array_equal(unpack(ban(tokens, vocab), vocab), ~allowed)
    assert allow_all(vocab, 3).shape == (3, num_words(vocab)) and unpack(allow_all(vocab, 3), vocab).all()


@settings(max_examples=60)
@given(
    tokens=st.lists(st.integers(0, 4), min_size=3, max_size=20),
    cuts=st.lists(st.tuples(st.integers(3, 20), st.integers(0, 4)), max_size=6),
    path=st.lists(st.integers(0, 4), max_size=4),
)
def test_kept_states_are_those_of_all_tokens(tokens: list[int], cuts: list[tuple[int, int]], path: list[int]) -> None:
    """Texts come in any order, older ones too, and with assumed tokens that may not stay."""
    with registered():
        processors = RequestProcessors.of(PARAMS, tokens[:3])
        for length, assumed in cuts:
            known = [*tokens[:length], *([4] * assumed)]
            fresh = RequestProcessors.of(PARAMS, tokens[:3])
            paths = [path[:n] for n in range(len(path) + 1)]
            found = processors.states(known, len(known) - assumed, paths)
            assert found == [fresh.states([*known, *each], len(known) + len(each), [()])[0] for each in paths]


def test_a_drafter_elsewhere_has_the_same_states() -> None:
    encoder, decoder = ContextEncoder(), ContextDecoder()
    tokens, logits = [0, 1, 2], torch.randn(1, V, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    own = RequestProcessors.of(PARAMS, tokens)
    for added, assumed in (((1, 2), 0), ((4,), 2), ((3, 3, 1), 1), ((), 0)):
        tokens = [*tokens[: len(tokens)], *added]
        context = DraftContext("s", tokens, 3, PARAMS, 0, StreamKind.DRAFT, assumed, None, own)
        there = decoder.decode(encoder.encode(context))
        assert there.processors is not None
        here, elsewhere = [edit(logits, PARAMS, History.of_context(each, [[2]])) for each in (context, there)]
        assert torch.equal(here, elsewhere)
        assert torch.equal(here, edit(logits, PARAMS, History(tokens, 3, [[2]])))


def test_a_drafter_that_lacks_a_processor_drafts_without() -> None:
    context = DraftContext("s", [0, 1, 2], 3, PARAMS, 0, StreamKind.DRAFT)
    update = ContextEncoder().encode(context)
    LOGITS_PROCESSORS.unregister("no-repeat")
    logits, there = torch.ones(1, V), ContextDecoder().decode(update)
    assert torch.equal(edit(logits, PARAMS, History.of_context(there, [[]])), logits)


def test_which_requests_have_only_masks() -> None:
    only = {"min_tokens": 3, "stop_token_ids": (1,), "allowed_token_ids": [1, 2], "bad_words_token_ids": [[1]]}
    assert RequestProcessors.of(SamplingParams(**only, logits_processors={"no-repeat": {}}), [0]).only_masks  # type: ignore[arg-type]
    assert not RequestProcessors.of(SamplingParams(logit_bias={1: 1.0}, min_tokens=2), [0]).only_masks
    assert not RequestProcessors.of(SamplingParams(logits_processors={"prefers-sum": {}}), [0]).only_masks


WRONG: list[tuple[dict[str, Any], str, str]] = [
    ({"allowed_token_ids": []}, "allowed_token_ids", "[]"),
    ({"allowed_token_ids": "12"}, "allowed_token_ids", "'12'"),
    ({"allowed_token_ids": [1, V]}, "allowed_token_ids", str(V)),
    ({"allowed_token_ids": [True]}, "allowed_token_ids", "True"),
    ({"bad_words_token_ids": [[]]}, "bad_words_token_ids", "[]"),
    ({"bad_words_token_ids": [1]}, "bad_words_token_ids", "1"),
    ({"bad_words_token_ids": [[1, -1]]}, "bad_words_token_ids", "-1"),
    ({"bad_words_token_ids": [[1, V]]}, "bad_words_token_ids", str(V)),
    ({"bad_words_token_ids": [[1]], "allowed_token_ids": [1]}, "bad_words_token_ids", "every allowed token"),
    ({"min_tokens": 1, "stop_token_ids": [1], "allowed_token_ids": [1]}, "stop_token_ids", "every token"),
    ({"logits_processors": {"missing": {}}}, "logits_processors", "'missing'"),
    ({"logits_processors": {"penalties": {}}}, "logits_processors", "'penalties'"),
    ({"logits_processors": {"no-repeat": 5}}, "logits_processors", "5"),
    ({"logits_processors": ["no-repeat"]}, "logits_processors", "no-repeat"),
    ({"logits_processors": {"prefers-sum": {"scale": "x"}}}, "logits_processors.prefers-sum.scale", "'x'"),
    ({"logits_processors": {"prefers-sum": {"colour": 1}}}, "logits_processors.prefers-sum.colour", "1"),
    ({"logits_processors": {"fails": {}}}, "logits_processors.fails", "KeyError"),
]


class Fails(LogitsProcessor):
    """Raises when it is built."""

    name: ClassVar[str] = "fails"
    masks: ClassVar[bool] = True
    Options: ClassVar[type[NoOptions]] = NoOptions

    @classmethod
    def build(cls, options: NoOptions, sampling: SamplingParams) -> Fails:
        raise KeyError("no such grammar")

    def start(self, prompt: Sequence[int]) -> None: ...

    def advance(self, state: None, token: int) -> None: ...


@pytest.mark.parametrize(("given_fields", "field", "shown"), WRONG)
def test_wrong_values_are_named(given_fields: dict[str, Any], field: str, shown: str) -> None:
    LOGITS_PROCESSORS.register("fails", Fails)
    try:
        with pytest.raises(InvalidInput) as refused:
            request = make_request("r", [0, 1], SamplingParams.parse(given_fields))
            resolved = InputProcessor(V, 50, frozenset(), "auto", 4).resolve(request)
            RequestProcessors.of(resolved.sampling, resolved.prompt)
    finally:
        LOGITS_PROCESSORS.unregister("fails")
    assert refused.value.field == field
    assert shown in str(refused.value)


def test_only_plug_ins_are_offered_to_a_request() -> None:
    """The processors of cospec are set by fields, so an error does not offer their names."""
    request = make_request("r", (0, 1), SamplingParams(logits_processors={"missing": {}}))
    with pytest.raises(InvalidInput) as refused:
        InputProcessor(V, 50, frozenset(), "auto", 4).resolve(request)
    assert "no-repeat" in str(refused.value) and "penalties" not in str(refused.value)
