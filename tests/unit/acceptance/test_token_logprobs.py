"""Log-probabilities against a direct log_softmax: with drafts, chunks and preemption."""

from __future__ import annotations

import pytest
import torch

from cospec.acceptance.token_logprobs import row_logprobs
from cospec.core.stats import TokenLogprobs
from cospec.core.types import SpeculationParams
from cospec.drafters.model import ModelDrafter
from cospec.models.toy import ToyModel
from cospec.sampling_params import SamplingParams
from harness.toys import ScriptedDrafter, make_request, run_all, tokens_of, toy_engine, with_pool

VOCAB = 6


def reference(context: list[int], token: int, top: int) -> TokenLogprobs:
    values = torch.log_softmax(ToyModel(VOCAB, seed=1).logits(context), -1)
    order = sorted(range(VOCAB), key=lambda t: -float(values[t]))
    return TokenLogprobs(
        token, float(values[token]), order.index(token) + 1, tuple((t, float(values[t])) for t in order[:top])
    )


def assert_same(found: tuple[TokenLogprobs | None, ...], wanted: list[TokenLogprobs]) -> None:
    assert len(found) == len(wanted)
    for one, other in zip(found, wanted, strict=True):
        assert one is not None
        assert (one.token, one.rank) == (other.token, other.rank)
        assert one.logprob == pytest.approx(other.logprob, abs=1e-12)
        assert [token for token, _ in one.top] == [token for token, _ in other.top]
        assert [value for _, value in one.top] == pytest.approx([value for _, value in other.top])


@pytest.mark.parametrize("acceptance_method", ["match", "rejection", "block"])
@pytest.mark.parametrize("drafter", ["none", "itself", "other", "tree"])
@pytest.mark.parametrize(("pages", "chunk"), [(256, 64), (256, 3), (9, 64), (9, 5)])
def test_every_token_has_its_logprob(acceptance_method: str, drafter: str, pages: int, chunk: int) -> None:
    drafters = {
        "none": lambda: None,
        "itself": lambda: ModelDrafter(ToyModel(VOCAB, seed=1)),
        "other": lambda: ModelDrafter(ToyModel(VOCAB, seed=2)),
        "tree": lambda: ScriptedDrafter([0, 1, 2, 3], [-1, -1, 1, 1]),
    }
    model = with_pool(ToyModel(VOCAB, seed=1), pages, 4)
    engine = toy_engine(model, drafters[drafter](), acceptance_method, 3, max_num_batched_tokens=chunk)
    params = SamplingParams(
        max_tokens=15, temperature=1.5, top_k=3, repetition_penalty=1.2, logprobs=2, prompt_logprobs=3
    )
    prompts = [tuple((i * i + n) % VOCAB for i in range(9 + n)) for n in range(4)]
    requests = [
        make_request(f"r{n}", prompt, params, speculation=SpeculationParams(acceptance_method=acceptance_method))
        for n, prompt in enumerate(prompts)
    ]
    events = run_all(engine, requests)
    tokens = tokens_of(events)
    if drafter == "tree":  # a chain rule is shown no tree; a tree of one node is a chain
        metrics = engine.metrics()
        assert (metrics.draft_tokens == metrics.drafts) == (acceptance_method != "match")
    for request in requests:
        written = list(tokens[request.id])
        text = [*request.prompt, *written]
        own = tuple(row for event in events[request.id] for row in event.logprobs)
        n = len(request.prompt)
        assert_same(own, [reference(text[: n + i], token, 2) for i, token in enumerate(written)])
        given = [event.prompt_logprobs for event in events[request.id] if event.prompt_logprobs is not None]
        assert len(given) == 1
        assert given[0][0] is None
        assert_same(given[0][1:], [reference(text[:i], text[i], 3) for i in range(1, n)])
    if pages < 20:
        assert engine.metrics().num_preemptions > 0


def test_preemption_in_the_middle_of_a_prompt() -> None:
    """What was reported of the prompt's first chunk is not reported again."""
    params = SamplingParams(max_tokens=2, prompt_logprobs=0)
    model = with_pool(ToyModel(VOCAB, seed=1), 8, 2)
    engine = toy_engine(model, None, max_num_batched_tokens=4, max_num_seqs=2)
    elder = make_request("elder", (0, 1), SamplingParams(max_tokens=12))
    prompt = (0, 1, 2, 3, 4, 5, 0, 1, 2, 3, 4)
    events = run_all(engine, [elder, make_request("late", prompt, params, arrival=1.0)])
    assert events["late"][-1].stats is not None
    assert events["late"][-1].stats.preemptions > 0
    given = next(event.prompt_logprobs for event in events["late"] if event.prompt_logprobs is not None)
    assert_same(given[1:], [reference(list(prompt[:i]), prompt[i], 0) for i in range(1, len(prompt))])
    assert [row.token for row in given[1:] if row] == list(prompt[1:])


def test_trimmed_with_the_tokens() -> None:
    """A stop token in the middle of an accepted path: no logprobs are reported after it."""
    model = ToyModel(VOCAB, seed=1)
    greedy = SamplingParams(max_tokens=12, temperature=0)
    line = tokens_of(run_all(toy_engine(model, None), [make_request("a", (0, 1), greedy)]))["a"]
    stop = line[2]
    params = SamplingParams(max_tokens=12, temperature=0, stop_token_ids=(stop,), logprobs=1)
    engine = toy_engine(ToyModel(VOCAB, seed=1), ModelDrafter(ToyModel(VOCAB, seed=1)), "match", 6)
    events = run_all(engine, [make_request("a", (0, 1), params)])["a"]
    wanted = line[: line.index(stop) + 1]
    assert tuple(t for event in events for t in event.tokens) == wanted
    assert tuple(row.token for event in events for row in event.logprobs) == wanted
    assert sum(len(event.sources) for event in events) == len(wanted)


def test_logprobs_are_those_before_any_processor() -> None:
    logits = torch.tensor([[0.0, 1.0, 3.0, 2.0], [5.0, 5.0, 0.0, -torch.inf]], dtype=torch.float32)
    first, second = row_logprobs(logits, [1, 0], 2)
    wanted = torch.log_softmax(logits.double(), -1)
    assert (first.token, first.rank) == (1, 3)
    assert first.logprob == pytest.approx(float(wanted[0, 1]))
    assert [token for token, _ in first.top] == [2, 3]
    assert (second.rank, len(second.top)) == (1, 2)
    assert row_logprobs(logits, [1, 0], 0)[0].top == ()
    assert len(row_logprobs(logits, [1, 0], 20)[0].top) == 4
