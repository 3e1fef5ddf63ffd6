"""Offline interface: load a model, complete prompts, return texts. Names follow vLLM."""

from __future__ import annotations

import gc
import logging
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, closing
from dataclasses import fields, replace
from functools import cached_property
from itertools import count
from pathlib import Path
from types import TracebackType
from typing import Any

from cospec.config import EngineConfig, SpeculativeConfig, read_json
from cospec.core.engine import Engine
from cospec.core.types import Event, Request, SpeculationParams
from cospec.errors import EngineStopped, InvalidInput, words
from cospec.ignored_vllm_options import without_vllm_options
from cospec.outputs import OutputBuilder, RequestOutput
from cospec.sampling_params import SamplingParams
from cospec.text.input_processor import make_requests
from cospec.text.prompt_inputs import Message, Prompt, conversations, each, read, text
from cospec.text.tokenizer import TextTokenizer

log = logging.getLogger(__name__)


class LLM:
    """A model with its drafters for offline generation.

    ``close``, or the end of a ``with`` block, frees models, caches, threads and processes.

    Args:
        model: ``zoo``, ``zoo:NAME``, a folder, a GGUF file or a hub name.
        models, ensemble: several models with one joint distribution, such as ``{"method": "weighted", "weights": [0.6,
            0.4]}``. ``ensemble`` without ``models`` combines ``model`` and its drafter.
        speculative_config: the drafter and the acceptance method. None takes the model's default; the zoo has a
            drafter.
        options: any other field of ``EngineConfig``. A vLLM keyword is accepted if the keyword changes nothing.

    Raises:
        CospecError: cospec cannot serve a model, an option or a combination. The message is one sentence.
    """

    def __init__(
        self,
        model: str = "zoo",
        speculative_config: Mapping[str, Any] | SpeculativeConfig | None = None,
        models: Sequence[str | Path] | None = None,
        ensemble: Mapping[str, Any] | str | None = None,
        **options: Any,
    ) -> None:
        given = {"model": str(model), "models": models, "ensemble": ensemble, "speculative_config": speculative_config}
        config = EngineConfig.build(given | without_vllm_options(options))
        from cospec.assembly.build import build_engine  # heavy imports, only for an engine that loads models

        self._open(build_engine(config))

    @classmethod
    def from_engine(cls, engine: Engine) -> LLM:
        """Wrap an engine that exists already."""
        made = cls.__new__(cls)
        made._open(engine)
        return made

    def _open(self, engine: Engine) -> None:
        self._engine: Engine | None = engine
        self._numbers = count()
        self._inboxes: dict[str, deque[Event]] = {}

    def close(self) -> None:
        """Abort all requests, end the drafters' threads and processes, and free models and caches.

        Every later call raises ``EngineStopped``; a second ``close`` does nothing. Python also frees an unreferenced
        LLM, but at no fixed time.
        """
        engine, self._engine = self._engine, None
        if engine is None:
            return
        for inbox in self._inboxes.values():
            inbox.clear()
        self._inboxes.clear()
        self.__dict__.pop("_tokens", None)
        engine.close()
        del engine
        gc.collect()  # models are parts of reference cycles, which only the collector frees

    def __enter__(self) -> LLM:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def engine(self) -> Engine:
        """The engine that runs the requests.

        Raises:
            EngineStopped: ``close`` was called.
        """
        if self._engine is None:
            raise EngineStopped("This LLM is closed and generates no more tokens; make a new LLM.")
        return self._engine

    @property
    def model_path(self) -> Path | None:
        """The folder of the weights."""
        return self.engine.model_path

    @property
    def model_paths(self) -> tuple[Path, ...]:
        """The folders of all models of an ensemble."""
        return self.engine.model_paths

    @property
    def tokenizer(self) -> Any:
        """The Hugging Face tokenizer."""
        return self.engine.tokenizer

    def get_tokenizer(self) -> Any:
        """The Hugging Face tokenizer, under the name of vLLM's method."""
        return self.tokenizer

    def generate(
        self,
        prompts: Prompt | Iterable[Prompt],
        sampling_params: SamplingParams | Iterable[SamplingParams] | None = None,
        speculation: SpeculationParams | Mapping[str, Any] | None = None,
        ensemble: Mapping[str, Any] | str | None = None,
        *,
        use_tqdm: bool | Callable[..., Any] = False,
    ) -> list[RequestOutput]:
        """Complete all prompts together; return results in the order of the prompts.

        A failed output has ``finish_reason`` "error" and one sentence in ``error``. The log repeats the sentence.

        Args:
            prompts: one prompt or several; each is a text, a list of token ids, ``{"prompt": text}`` or
                ``{"prompt_token_ids": ids}``.
            sampling_params: one for all prompts, or one per prompt.
            speculation: choices other than the loaded configuration; a mapping has the keys of ``SpeculationParams``.
            ensemble: a blend of the models other than the loaded blend, as an object or JSON text.
            use_tqdm: True shows a bar of finished outputs on stderr; a callable replaces ``tqdm``.

        Raises:
            InvalidInput: cospec cannot serve a prompt or a parameter. Then no prompt runs.
        """
        listed = each(prompts)
        params = _match(sampling_params, len(listed))
        chosen, blend = _choices(speculation), _ensemble(ensemble)
        calls = [
            self._requests(prompt, how, streams=False, speculation=chosen, ensemble=blend)
            for prompt, how in zip(listed, params, strict=True)
        ]
        requests = [request for call in calls for request in call]
        builders = {request.id: OutputBuilder() for request in requests}
        with _bar(use_tqdm, len(requests)) as bar:
            for event in self._follow(requests):
                builders[event.id].add(event)
                if event.finish is not None:
                    bar.update(1)
                if event.error is not None:
                    log.error("output %d of request %s ended with an error: %s", event.index, event.parent, event.error)
        return [
            self._output(prompt, requests, builders, how)
            for prompt, requests, how in zip(listed, calls, params, strict=True)
        ]

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Iterable[SamplingParams] | None = None,
        speculation: SpeculationParams | Mapping[str, Any] | None = None,
        ensemble: Mapping[str, Any] | str | None = None,
        *,
        use_tqdm: bool | Callable[..., Any] = False,
    ) -> list[RequestOutput]:
        """Answer one conversation or several through the tokenizer's chat template; arguments as in ``generate``."""
        prompts = [self._tokens.chat(each) for each in conversations(messages)]
        return self.generate(prompts, sampling_params, speculation, ensemble, use_tqdm=use_tqdm)

    def stream(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        speculation: SpeculationParams | Mapping[str, Any] | None = None,
        ensemble: Mapping[str, Any] | str | None = None,
    ) -> Iterator[Event]:
        """Complete one prompt and yield its events as they arrive; closing the iterator aborts the request."""
        (params,) = _match(sampling_params, 1)
        return self._follow(
            self._requests(prompt, params, speculation=_choices(speculation), ensemble=_ensemble(ensemble))
        )

    def encode(self, prompt: Prompt) -> list[int]:
        """Return the token ids of a prompt; a prompt of ids stays unchanged."""
        return read(prompt, self._tokens)

    @cached_property
    def _tokens(self) -> TextTokenizer:
        return TextTokenizer(self.tokenizer, self.engine.max_model_len, self.engine.vocab_size)

    def _requests(self, prompt: Prompt, params: SamplingParams, **how: Any) -> list[Request]:
        made = make_requests(f"llm-{next(self._numbers)}", self.encode(prompt), params, arrival=time.monotonic())
        return [replace(request, **how) for request in made]

    def _follow(self, requests: Sequence[Request]) -> Iterator[Event]:
        """Run ``requests`` and yield their events until every request has ended.

        Several calls may be open at once, such as two streams read in turn. The call that steps the engine puts events
        of other calls into their inboxes.
        """
        inbox: deque[Event] = deque()
        missing: set[str] = set()
        try:
            for request in requests:
                self.engine.add(request)
                missing.add(request.id)
                self._inboxes[request.id] = inbox
            while missing:
                while not inbox:
                    for event in self.engine.step():
                        if event.id in self._inboxes:
                            self._inboxes[event.id].append(event)
                event = inbox.popleft()
                if event.finish is not None:
                    missing.discard(event.id)
                yield event
        finally:  # an interrupt or a refused request must not leave requests in the engine
            if self._engine is not None:
                self._engine.abort(missing)
            for request in requests:
                self._inboxes.pop(request.id, None)

    def _output(
        self, prompt: Prompt, requests: Sequence[Request], builders: Mapping[str, OutputBuilder], params: SamplingParams
    ) -> RequestOutput:
        own = [builders[request.id] for request in requests]
        return RequestOutput(
            request_id=requests[0].parent,
            prompt=text(prompt),
            prompt_token_ids=requests[0].prompt,
            prompt_logprobs=own[0].prompt_logprobs,
            outputs=tuple(builder.build(params.logprobs is not None) for builder in own),
            distribution=own[0].distribution,
            exact=own[0].exact,
        )


def _bar(wanted: bool | Callable[..., Any], total: int) -> AbstractContextManager[Any]:
    """Return the progress bar of ``total`` outputs; the bar shows nothing if ``wanted`` is False."""
    from tqdm.auto import tqdm  # imported here, because a start needs no bar

    make = wanted if callable(wanted) else tqdm
    shown = {} if callable(wanted) else {"disable": not wanted}
    return closing(make(total=total, desc="outputs", dynamic_ncols=True, **shown))


def _match(params: Any, n: int) -> list[SamplingParams]:
    if params is None or isinstance(params, SamplingParams):
        return [params or SamplingParams()] * n
    several = isinstance(params, Iterable) and not isinstance(params, str | Mapping)
    found = list(params) if several else [params]
    wrong = next((one for one in found if not isinstance(one, SamplingParams)), None)
    if wrong is not None or None in found:
        raise InvalidInput("sampling_params", wrong, "a SamplingParams, or a list of one per prompt")
    if len(found) != n:
        raise InvalidInput("sampling_params", words(f"{len(found)} of them"), f"one, or one per prompt, here {n}")
    return found


def _ensemble(given: Any) -> Mapping[str, Any] | None:
    ensemble = read_json(given, "ensemble") if isinstance(given, str) else given
    if not isinstance(ensemble, Mapping | None):
        raise InvalidInput("ensemble", ensemble, "an object such as {'method': 'weighted', 'lambda': 0.3}")
    return ensemble


def _choices(given: Any) -> SpeculationParams:
    if given is None or isinstance(given, SpeculationParams):
        return given or SpeculationParams()
    known = [field.name for field in fields(SpeculationParams)]
    if not isinstance(given, Mapping) or not set(given) <= set(known):
        raise InvalidInput("speculation", given, "SpeculationParams or a mapping with the keys " + ", ".join(known))
    return SpeculationParams(**given)
