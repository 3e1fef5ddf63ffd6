"""A request with extreme parameters, or one whose own part raises, changes no token of its neighbours."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from cospec.core.engine import Engine
from cospec.core.model_io import TokenBatch
from cospec.core.types import Event, FinishReason, Request, SpeculationParams
from cospec.drafters.model import ModelDrafter
from cospec.errors import InvalidInput
from cospec.models.toy import ToyModel
from cospec.native import library
from cospec.registry import ACCEPTANCE_METHODS
from cospec.runtime.codec import Codec
from cospec.runtime.engine_process_main import EngineCoreProc, ProgressCounter
from cospec.runtime.messages import EngineCommand, EngineReply, Events, Stop, Submit
from cospec.sampling_params import GREEDY_BELOW, LARGEST_WHOLE, SamplingParams
from cospec.text.detokenizer import IncrementalDetokenizer
from harness.llamas import llama_engine, load
from harness.toys import make_request, toy_engine

TINY = 5e-324
LENGTH = 10
PROMPTS = [(0, 1, 0, 1), (2, 3, 1), (1, 1, 1, 0)]


class Single(ToyModel):
    """A toy in single precision with logits as large as those of trained models, which the native judge reads."""

    dtype = torch.float32

    def __init__(self, seed: int) -> None:
        super().__init__(5, order=2, seed=seed, sharpness=8.0)

    def forward(self, batch: TokenBatch) -> Tensor:
        return super().forward(batch).float()


def single_engine(native: str) -> Engine:
    return toy_engine(Single(1), ModelDrafter(Single(3)), k=4, max_nodes=6, native=native)


@pytest.fixture(params=["toy", "toy without kernels", "readable toy", "llama", "readable llama"])
def engine(request: pytest.FixtureRequest, folders: tuple[Path, Path]) -> Iterator[Engine]:
    """Engines that verify by the library, by the readable methods, and whole steps in the library."""
    if request.param != "toy without kernels" and not library.available():
        pytest.skip(library.why_not() or "native kernels")
    native = "off" if "readable" in request.param else "auto"
    with ExitStack() as stack:
        if request.param == "toy without kernels":
            stack.enter_context(patch("cospec.native.library.available", lambda: False))
        if "llama" in request.param:
            drafter = ModelDrafter(load(folders[1]), native=native == "auto")
            yield llama_engine(load(folders[0]), drafter, k=4, native=native)
        else:
            yield single_engine(native)


@st.composite
def extremes(draw: st.DrawFn) -> SamplingParams:
    """Every parameter at an end of what is allowed, or at its default."""
    logprobs = st.sampled_from([None, 0, 1, 20])
    return SamplingParams(
        temperature=draw(st.sampled_from([0.0, TINY, GREEDY_BELOW, 1e-3, 1.0, 100.0])),
        top_p=draw(st.sampled_from([TINY, 1e-300, 0.5, 1.0])),
        top_k=draw(st.sampled_from([-1, 0, 1, 2, LARGEST_WHOLE])),
        min_p=draw(st.sampled_from([0.0, TINY, 0.5, 1.0])),
        repetition_penalty=draw(st.sampled_from([0.01, 1.0, 100.0])),
        presence_penalty=draw(st.sampled_from([-2.0, 0.0, 2.0])),
        frequency_penalty=draw(st.sampled_from([-2.0, 0.0, 2.0])),
        logit_bias=draw(st.sampled_from([None, {0: 100.0}, {token: -100.0 for token in range(5)}, {0: TINY, 1: -100}])),
        min_tokens=draw(st.sampled_from([0, 4])),
        max_tokens=draw(st.sampled_from([4, 6])),
        stop_token_ids=draw(st.sampled_from([(), (0,), (0, 1, 2, 3)])),
        seed=draw(st.sampled_from([-(2**63), 0, 2**64 - 1])),
        logprobs=draw(logprobs),
        prompt_logprobs=draw(logprobs),
    )


def neighbours() -> list[Request]:
    """Greedy, seeded and judged by each exact rule; their drafts depend on nothing but themselves."""
    shapes = [("match", 0.0), ("match", 1.0), ("rejection", 0.7), ("block", 1.0), ("recursive", 1.0)]
    return [
        make_request(
            f"neighbour{n}",
            PROMPTS[n % 3],
            SamplingParams(max_tokens=LENGTH, temperature=temperature, seed=n),
            speculation=SpeculationParams(acceptance_method=acceptance_method),
        )
        for n, (acceptance_method, temperature) in enumerate(shapes)
    ]


def run(engine: Engine, requests: Sequence[Request]) -> dict[str, list[Event]]:
    found: dict[str, list[Event]] = {request.id: [] for request in requests}
    for request in requests:
        try:
            engine.add(request)
        except InvalidInput:
            del found[request.id]
    for _ in range(1000):
        if not engine.has_work:
            break
        for event in engine.step():
            found[event.id].append(event)
        engine.check_integrity()
    assert all(events[-1].finish is not None for events in found.values())
    return found


def tokens(found: dict[str, list[Event]], prefix: str = "neighbour") -> dict[str, list[int]]:
    return {id: [t for e in events for t in e.tokens] for id, events in found.items() if id.startswith(prefix)}


@pytest.fixture
def alone(engine: Engine) -> dict[str, list[int]]:
    """The neighbours' tokens before any odd request."""
    return tokens(run(engine, neighbours()))


@settings(max_examples=40, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(several=st.lists(extremes(), min_size=1, max_size=3), length=st.sampled_from([0, 1, 4]))
def test_extreme_parameters_change_no_neighbours_tokens(
    engine: Engine, alone: dict[str, list[int]], several: list[SamplingParams], length: int
) -> None:
    """All allowed extremes at once, under every rule; each such request ends by itself, whatever comes of it."""
    odd = [
        make_request(
            f"odd{n}-{acceptance_method}",
            (0, 1, 0, 1),
            params,
            speculation=SpeculationParams(acceptance_method=acceptance_method, length=length),
        )
        for n, params in enumerate(several)
        for acceptance_method in ACCEPTANCE_METHODS
    ]
    found = run(engine, [*odd[::2], *neighbours(), *odd[1::2]])
    assert tokens(found) == alone
    vocab = engine.vocab_size
    assert all(0 <= token < vocab for written in tokens(found, "odd").values() for token in written)


class Huge(Single):
    """Logits at the end of single precision after the token 4, which a penalty makes infinite."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.table[:, 4] = torch.where(self.table[:, 4] > 0, 3e38, -3e38)
        self.table[4] = torch.where(self.table[4] > 0, 3e38, -3e38)
        self.table[..., 4] = -30.0


@pytest.mark.parametrize("kernels", [True, False])
@pytest.mark.parametrize("acceptance_method", list(ACCEPTANCE_METHODS))
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_infinite_logits_end_one_request(acceptance_method: str, temperature: float, kernels: bool) -> None:
    params = SamplingParams(max_tokens=6, repetition_penalty=0.01, temperature=temperature, logprobs=1, seed=1)
    odd = make_request(
        "odd", (4, 0, 1, 2, 3, 4), params, speculation=SpeculationParams(acceptance_method=acceptance_method)
    )
    native = "auto" if kernels else "off"
    for drafter in (ModelDrafter(Huge(1)), ModelDrafter(Single(3)), None):
        engine = toy_engine(Huge(1), drafter, k=4, native=native)
        alone = tokens(run(toy_engine(Huge(1), drafter, k=4, native=native), neighbours()))
        found = run(engine, [odd, *neighbours()])
        assert found["odd"][-1].finish is FinishReason.ERROR
        assert found["odd"][-1].error
        assert tokens(found) == alone


class Commands:
    """A connection of an engine's loop: gives requests, then the order to stop once all have ended."""

    def __init__(self, requests: Sequence[Request]) -> None:
        self.waiting: list[Submit | Stop] = [Submit(tuple(requests))]
        self.left = {request.id for request in requests}
        self.events: dict[str, list[Event]] = {request.id: [] for request in requests}

    def fileno(self) -> int:
        return -1

    def poll(self, seconds: float = 0.0) -> bool:
        return bool(self.waiting)

    def receive(self, seconds: float | None = None) -> EngineCommand | None:
        return self._sent(self.waiting.pop(0), EngineCommand) if self.waiting else None

    def send(self, message: EngineReply) -> None:
        reply = self._sent(message, EngineReply)
        for event in reply.events if isinstance(reply, Events) else ():
            self.events[event.id].append(event)
            self.left -= {event.id} if event.finish is not None else set()
        if not self.left:
            self.waiting = [Stop()]

    def _sent(self, message: Any, accepts: Any) -> Any:
        """What the other process gets of a message."""
        return Codec(accepts).decode(Codec(accepts).encode(message))


@pytest.mark.parametrize("acceptance_method", list(ACCEPTANCE_METHODS))
def test_the_engines_process_ends_one_request_of_many(acceptance_method: str) -> None:
    """Through the loop that the server talks to, where an error without a name used to end every live request."""
    params = SamplingParams(max_tokens=6, repetition_penalty=0.01, logprobs=1, seed=1)
    odd = make_request(
        "odd", (4, 0, 1, 2, 3, 4), params, speculation=SpeculationParams(acceptance_method=acceptance_method, length=4)
    )
    drafter = ModelDrafter(Single(3))
    alone = tokens(run(toy_engine(Huge(1), drafter, k=4, native="off"), neighbours()))
    socket = Commands([odd, *neighbours()])
    EngineCoreProc(
        toy_engine(Huge(1), drafter, k=4, native="off"), socket, ProgressCounter(bytearray(ProgressCounter.SIZE))
    ).run()
    assert socket.events["odd"][-1].finish is FinishReason.ERROR
    assert tokens(socket.events) == alone


def where_it_raises() -> dict[str, Callable[[], AbstractContextManager[object]]]:
    """Patches that make one part of the work raise for the request ``odd`` only."""
    from cospec.acceptance import python_verification, rejection, token_logprobs, typical
    from cospec.drafters import model as drafting

    def breaking(place: object, name: str, is_odd: Callable[..., bool]) -> Callable[[], AbstractContextManager[object]]:
        kept = getattr(place, name)

        def wrapped(*args: object, **more: object) -> object:
            if is_odd(*args):
                raise RuntimeError("a part that raises")
            return kept(*args, **more)

        return lambda: patch.object(place, name, wrapped)

    return {
        "edit": breaking(python_verification, "edit", lambda logits, params, history: params.min_tokens == 2),
        "logprobs": breaking(token_logprobs, "row_logprobs", lambda rows, tokens, wanted: wanted == 3),
        "typical": breaking(typical, "path_to", lambda *_: True),
        "rejection": breaking(rejection, "residual", lambda probs, draft, node: draft.id == "odd"),
        "text": breaking(IncrementalDetokenizer, "take", lambda stream, _: stream.params.min_tokens == 2),
        "late text": breaking(
            IncrementalDetokenizer, "release", lambda stream, *_: stream.params.min_tokens == 2 and stream.pending
        ),
        "drafter": breaking(
            drafting.ModelDrafter, "propose", lambda _, contexts, budgets: any(c.id == "odd" for c in contexts)
        ),
    }


@pytest.mark.parametrize("part", list(where_it_raises()))
@pytest.mark.parametrize("round_name", ["sequential", "pipelined", "draft-ahead", "draft-for-outcomes"])
def test_a_part_that_raises_ends_its_request_alone(part: str, round_name: str) -> None:
    from cospec.assembly.build import assemble
    from cospec.assembly.components import TextInfo
    from cospec.config import EngineConfig, SpeculativeConfig

    def build() -> Engine:
        speculative = SpeculativeConfig(num_speculative_tokens=3, execution_mode=round_name)
        config = EngineConfig(native="off")  # the native methods cannot be made to raise
        return Engine(assemble(Single(1), ModelDrafter(Single(3)), speculative, config, TextInfo()))

    acceptance_method = part if part in ACCEPTANCE_METHODS else "rejection"
    params = SamplingParams(max_tokens=20, min_tokens=2, stop_token_ids=(4,), logprobs=3, seed=5)
    odd = make_request(
        "odd",
        (0, 1, 0),
        replace(params, temperature=1.5),
        speculation=SpeculationParams(acceptance_method=acceptance_method),
    )
    others = [request for request in neighbours() if request.speculation.acceptance_method != acceptance_method]
    alone = tokens(run(build(), others))
    with where_it_raises()[part]():
        found = run(build(), [odd, *others])
    last = found["odd"][-1]
    assert last.finish is FinishReason.ERROR and last.error is not None
    assert "RuntimeError" in last.error and "a part that raises" in last.error
    assert tokens(found) == alone
