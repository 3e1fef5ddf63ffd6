"""The offline face: load a model, give prompts, get texts. The names follow vLLM's."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Mapping
from collections.abc import Sequence as Seq
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

from cospec.config import EngineConfig, SpeculativeConfig
from cospec.engine.engine import Engine
from cospec.engine.requests import make_requests
from cospec.errors import InvalidInput
from cospec.outputs import OutputBuilder, RequestOutput
from cospec.params import SamplingParams
from cospec.types import Event, Request, Speculation

Prompt = str | Seq[int]
Message = Mapping[str, str]


class LLM:
    """A model with its drafters, ready to write.

    Args:
        model: ``zoo``, ``zoo:NAME``, a folder or a hub name.
        models, law: several models that speak as one, and how: ``{"blend": "weighted", "weights": [0.6, 0.4]}``. A law
            without models is over ``model`` and its drafter.
        speculative_config: how drafts are made and judged; None is the model's own default (the zoo has a drafter).
        options: any other field of ``EngineConfig``.

    Raises:
        CospecError: a model, option or combination that cannot be served, in one sentence.
    """

    def __init__(
        self,
        model: str = "zoo",
        speculative_config: Mapping[str, Any] | SpeculativeConfig | None = None,
        models: Seq[str | Path] | None = None,
        law: Mapping[str, Any] | str | None = None,
        **options: Any,
    ) -> None:
        given = {"model": str(model), "models": models, "law": law, "speculative_config": speculative_config}
        config = EngineConfig.build(given | options)
        self.engine = Engine.build(config)
        self._numbers = count()
        self._inboxes: dict[str, deque[Event]] = {}

    @property
    def model_path(self) -> Path | None:
        """The folder that the weights came from."""
        return self.engine.model_path

    @property
    def model_paths(self) -> tuple[Path, ...]:
        """The folders of all models that speak as one."""
        return self.engine.model_paths

    @property
    def tokenizer(self) -> Any:
        """The Hugging Face tokenizer in use."""
        return self.engine.tokenizer

    def generate(
        self,
        prompts: Prompt | Seq[Prompt],
        sampling_params: SamplingParams | Seq[SamplingParams] | None = None,
        speculation: Speculation = Speculation(),
        law: Mapping[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Complete prompts, all at once; results come in the order of the prompts.

        Args:
            prompts: texts or lists of token ids; a single one may stand by itself.
            sampling_params: one for all, or one per prompt.
            law: another blend of the models than the one that they were loaded with.

        Raises:
            InvalidInput: a prompt or parameter that cannot be served; then none of them runs.
        """
        listed = _as_list(prompts)
        params = _match(sampling_params, len(listed))
        calls = [self._requests(prompt, chosen, speculation) for prompt, chosen in zip(listed, params, strict=True)]
        calls = [[replace(request, law=law) for request in call] for call in calls]
        requests = [request for call in calls for request in call]
        builders = {request.id: OutputBuilder() for request in requests}
        for event in self._follow(requests):
            builders[event.id].add(event)
        return [
            self._output(prompt, requests, builders, chosen)
            for prompt, requests, chosen in zip(listed, calls, params, strict=True)
        ]

    def chat(
        self, messages: Seq[Message] | Seq[Seq[Message]], sampling_params: SamplingParams | None = None
    ) -> list[RequestOutput]:
        """Answer one conversation or a list of them, through the tokenizer's chat template."""
        several = messages and not isinstance(messages[0], Mapping)
        conversations = messages if several else [messages]
        return self.generate([self._templated(conversation) for conversation in conversations], sampling_params)

    def stream(self, prompt: Prompt, sampling_params: SamplingParams | None = None) -> Iterator[Event]:
        """Complete one prompt and give its events as they come; closing the iterator ends the work."""
        return self._follow(self._requests(prompt, sampling_params or SamplingParams(), Speculation()))

    def encode(self, prompt: Prompt) -> list[int]:
        """Token ids of a prompt; ids pass through."""
        if not isinstance(prompt, str):
            return list(prompt)
        return list(self.tokenizer.encode(prompt))

    def _templated(self, messages: Any) -> list[int]:
        if getattr(self.tokenizer, "chat_template", None) is None:
            raise InvalidInput("messages", messages, "a model whose tokenizer has a chat template; this one has none")
        text = self.tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        return list(self.tokenizer.encode(text, add_special_tokens=False))

    def _requests(self, prompt: Prompt, params: SamplingParams, speculation: Speculation) -> list[Request]:
        id = f"llm-{next(self._numbers)}"
        return make_requests(id, self.encode(prompt), params, speculation, time.monotonic())

    def _follow(self, requests: Seq[Request]) -> Iterator[Event]:
        """Run ``requests`` and give their events until each has ended.

        Several calls may be open at once, such as two streams read by turns: whoever steps the engine puts the others'
        events into their inboxes.
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
        finally:  # an interrupt, or a request that is refused, must not leave work behind
            self.engine.abort(missing)
            for request in requests:
                self._inboxes.pop(request.id, None)

    def _output(
        self, prompt: Prompt, requests: Seq[Request], builders: Mapping[str, OutputBuilder], params: SamplingParams
    ) -> RequestOutput:
        own = [builders[request.id] for request in requests]
        return RequestOutput(
            request_id=requests[0].parent,
            prompt=prompt if isinstance(prompt, str) else None,
            prompt_token_ids=requests[0].prompt,
            prompt_logprobs=own[0].prompt_logprobs,
            outputs=tuple(builder.build(params.logprobs is not None) for builder in own),
            law=own[0].law,
        )


def _as_list(prompts: Prompt | Seq[Prompt]) -> list[Prompt]:
    if isinstance(prompts, str) or (len(prompts) > 0 and isinstance(prompts[0], int)):
        return [prompts]  # type: ignore[list-item]
    return list(prompts)  # type: ignore[arg-type]


def _match(params: SamplingParams | Seq[SamplingParams] | None, n: int) -> list[SamplingParams]:
    if params is None or isinstance(params, SamplingParams):
        return [params or SamplingParams()] * n
    if len(params) != n:
        raise InvalidInput("sampling_params", f"{len(params)} of them", f"one, or one per prompt, here {n}")
    return list(params)
