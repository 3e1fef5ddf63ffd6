"""A request that goes on from committed tokens ends as without an interruption: tokens, text, log-probabilities."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models

from cospec.assembly.components import TextInfo
from cospec.core.types import Event, Request
from cospec.drafters.model import ModelDrafter
from cospec.drafters.ngram import NgramDrafter
from cospec.models.toy import ToyModel
from cospec.sampling_params import SamplingParams
from harness.ensembles import ensemble_engine, toys
from harness.toys import make_request, run_all, toy_engine

PIECES = ("a", "b", "Ã", "©", "ab", "Ġ", "<eos>")  # the third and fourth are the two bytes of one character
EOS = 6


@pytest.fixture(scope="module")
def text() -> TextInfo:
    made = Tokenizer(models.BPE(vocab={piece: id for id, piece in enumerate(PIECES)}, merges=[]))
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens(["<eos>"])
    return TextInfo(SimpleNamespace(backend_tokenizer=made), eos=frozenset({EOS}))


def written(text: TextInfo, requests: list[Request], ngram: bool) -> list[list[Event]]:
    drafter = NgramDrafter() if ngram else ModelDrafter(ToyModel(len(PIECES), seed=1))
    engine = toy_engine(ToyModel(len(PIECES), seed=0), drafter, text=text)
    found = run_all(engine, requests)
    return [found[request.id] for request in requests]


PARAMS = st.builds(
    SamplingParams,
    max_tokens=st.integers(1, 24),
    min_tokens=st.just(0),
    temperature=st.sampled_from((0.0, 0.8, 2.0)),
    seed=st.integers(0, 2**32),
    top_p=st.sampled_from((1.0, 0.8)),
    repetition_penalty=st.sampled_from((1.0, 1.7)),
    presence_penalty=st.sampled_from((0.0, 1.5)),
    frequency_penalty=st.sampled_from((0.0, -0.7)),
    stop=st.sampled_from(((), ("aba", "b a"), ("é b", "aab", "bé"))),
    include_stop_str_in_output=st.booleans(),
    logprobs=st.sampled_from((None, 2)),
    prompt_logprobs=st.sampled_from((None, 1)),
).flatmap(lambda params: st.builds(replace, st.just(params), min_tokens=st.integers(0, params.max_tokens or 0)))


@settings(max_examples=60)
@given(data=st.data(), params=PARAMS, ngram=st.booleans())
def test_any_cut_ends_alike(text: TextInfo, data: st.DataObject, params: SamplingParams, ngram: bool) -> None:
    prompts = data.draw(st.lists(st.lists(st.integers(0, 5), min_size=1, max_size=6), min_size=1, max_size=3))
    requests = [make_request(f"r{number}", prompt, params) for number, prompt in enumerate(prompts)]
    whole = written(text, requests, ngram)
    # Rounds of the second run come after a different number of tokens, so the cut falls anywhere between two events.
    cuts = [data.draw(st.integers(0, len(events) - 1)) for events in whole]
    before = [events[:cut] for events, cut in zip(whole, cuts, strict=True)]
    committed = [tuple(token for event in events for token in event.tokens) for events in before]
    resumed = [replace(request, resumed_output=tokens) for request, tokens in zip(requests, committed, strict=True)]
    after = written(text, resumed, not ngram)
    for request, first, head, tail in zip(requests, whole, before, after, strict=True):
        joined = [*head, *tail]
        assert [t for e in joined for t in e.tokens] == [t for e in first for t in e.tokens]
        assert "".join(e.text for e in joined) == "".join(e.text for e in first)
        assert (tail[-1].finish, tail[-1].stop_reason) == (first[-1].finish, first[-1].stop_reason)
        assert [row for e in joined for row in e.logprobs] == [row for e in first for row in e.logprobs]
        prompt_rows = [e.prompt_logprobs for e in joined if e.prompt_logprobs is not None]
        assert prompt_rows == [e.prompt_logprobs for e in first if e.prompt_logprobs is not None]
        assert sum(len(e.sources) for e in tail) == sum(len(e.tokens) for e in tail)
        assert tail[-1].stats is not None and first[-1].stats is not None
        assert tail[-1].stats.cached_prompt_tokens <= len(request.prompt)


def test_several_models_as_one_go_on_alike() -> None:
    params = SamplingParams(max_tokens=20, temperature=0.9, seed=5, frequency_penalty=0.4)
    request = make_request("r", (0, 1, 2), params)
    ensemble = {"method": "weighted", "weights": [0.6, 0.4]}
    first = run_all(ensemble_engine(toys(2), ensemble), [request])["r"]
    tokens = [token for event in first for token in event.tokens]
    for cut in range(1, len(tokens)):
        rest = run_all(ensemble_engine(toys(2), ensemble), [replace(request, resumed_output=tuple(tokens[:cut]))])["r"]
        assert [token for event in rest for token in event.tokens] == tokens[cut:]
