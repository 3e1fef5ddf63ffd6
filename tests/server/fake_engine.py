"""An engine without a model: it repeats the prompt, two tokens a round, the first as if from a drafter.

Words in the prompt make it misbehave: ``BREAK`` raises in a round and names its request, ``COLLAPSE`` raises without
naming anybody, ``DIE`` ends the process, ``FALL`` ends the process once eight others are there, or two that were there
before, ``LOSE`` loses the target after its first tokens, ``SLOW`` takes its time, ``FOREVER`` does not come to an end.
A module, so that the engine's process can import it.
"""

from __future__ import annotations

import hashlib
import os
import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from cospec.config import EngineConfig
from cospec.core.stats import RequestStats, TokenLogprobs
from cospec.core.types import Event, FinishReason, Request
from cospec.distributed.stage_host import read_token
from cospec.errors import InvalidInput, ModelError, RequestsFailed, words
from cospec.metrics.engine_counters import EngineMetrics
from cospec.sampling_params import SamplingParams
from cospec.text.input_processor import make_requests

CONTEXT = 256
DEFAULT_LENGTH = 16
SLOW_SECONDS = 0.01


TEMPLATE = (
    "{% if reasoning_effort is defined %}<{{ reasoning_effort }}>{% endif %}{% if mode %}<{{ mode }}>{% endif %}"
    "{% for m in messages %}{% if m['role'] == 'system' and loop.index > 1 %}{{ raise_exception('system is first') }}"
    "{% endif %}{{ m['role'][0] }}: {% if m.reasoning_content %}({{ m.reasoning_content }}){% endif %}"
    "{{ m['content'] }}\n{% endfor %}{% if add_generation_prompt %}a:{% endif %}"
)


def write_tokenizer(folder: Path, template: str | None = TEMPLATE) -> Path:
    """A tokenizer of single bytes and one special token, as a Hugging Face folder."""
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({char: id for id, char in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|end|>", clean_up_tokenization_spaces=False, chat_template=template
    ).save_pretrained(folder)
    return folder


@dataclass(frozen=True)
class FakeTokenizer:
    name_or_path: str


NODE = {
    "node": "small",
    "drafter": "fake",
    "method": "ngram",
    "state": "ready",
    "reason": "",
    "cost_per_hour": 0.5,
    "load_seconds": 0.01,
    "waiting": 1,
    "busy_seconds": 2.0,
    "latency_seconds": 0.004,
    **{
        name: 3
        for name in ("drafts", "scores", "steps", "late", "lost", "ignored", "damaged", "resyncs", "errors", "ended")
    },
}


class FakeEngine:
    max_model_len = CONTEXT

    def __init__(self, config: EngineConfig) -> None:
        self.config = config
        self.tokenizer: Any = FakeTokenizer(str(config.tokenizer))
        self._text = Tokenizer.from_file(str(Path(str(config.tokenizer)) / "tokenizer.json"))
        self.model_path = Path(str(config.tokenizer))
        self.model_name = config.served_model_name or "fake"
        self.vocab_size = self._text.get_vocab_size()
        self._requests: dict[str, Request] = {}
        self._written: dict[str, int] = {}
        self._held: dict[str, Event] = {}  # what requests wrote that do not stream
        self._finished: Counter[str] = Counter()
        self._steps = 0
        self.ended: str | None = None

    @classmethod
    def build(cls, config: EngineConfig) -> FakeEngine:
        if config.model == "missing":
            raise ModelError("model is 'missing'; allowed is a model that exists.")
        if config.model == "broken":
            raise ZeroDivisionError("bad arithmetic")
        if config.model == "endless":
            time.sleep(600)
        if config.model == "fatal":
            os._exit(7)
        return cls(config)

    @classmethod
    def build_with_token(cls, config: EngineConfig) -> FakeEngine:
        """An engine that read the token of stage hosts; the digest of the token is the model's name."""
        digest = hashlib.sha256(read_token(config.stage_token_file).encode()).hexdigest()
        return cls(config.model_copy(update={"served_model_name": digest}))

    def add(self, request: Request) -> None:
        text = self._text.decode(list(request.prompt))
        if "REFUSE" in text:
            raise InvalidInput("prompt", words("refused"), "another one")
        if "STUMBLE" in text:
            raise KeyError("stumbled")
        self._requests[request.id] = request
        self._written[request.id] = len(request.resumed_output or ())

    def abort(self, ids: Iterable[str]) -> None:
        for id in ids:
            if self._requests.pop(id, None) is not None:
                self._finished["abort"] += 1
            self._written.pop(id, None)
            self._held.pop(id, None)

    @property
    def has_work(self) -> bool:
        return bool(self._requests)

    def set_wakeup_fd(self, descriptor: int) -> None:
        pass

    def on_idle(self) -> None:
        pass

    def step(self) -> list[Event]:
        self._steps += 1
        texts = {id: self._text.decode(list(request.prompt)) for id, request in self._requests.items()}
        if any("DIE" in text for text in texts.values()):
            os._exit(3)
        others = [request for id, request in self._requests.items() if "FALL" not in texts[id]]
        if len(others) < len(texts) and (len(others) >= 8 or sum(bool(each.resumed_output) for each in others) >= 2):
            os._exit(4)
        if any("COLLAPSE" in text for text in texts.values()):
            raise RuntimeError("all of it broke")
        broken = tuple(id for id, text in texts.items() if "BREAK" in text)
        if broken:
            raise RequestsFailed("it broke", broken)
        begun = [id for id, request in self._requests.items() if self._written[id] and not request.resumed_output]
        if any("LOSE" in texts[id] for id in begun):
            self.ended = "The target is lost."
        if any("SLOW" in text or "FOREVER" in text for text in texts.values()):
            time.sleep(SLOW_SECONDS)
        events = []
        for request in list(self._requests.values()):
            event = self._advance(request)
            if not request.streams:
                event = _joined(self._held.pop(request.id, None), event)
                if event.finish is None:
                    self._held[request.id] = event
                    continue
            events.append(event)
        return events

    def check_integrity(self) -> None:
        """There is nothing here that could be lost."""

    def close(self) -> None:
        """Nor anything that could be ended."""

    def metrics(self) -> EngineMetrics:
        return EngineMetrics(
            requests_running=len(self._requests),
            kv_cache_usage=0.5 if self._requests else 0.0,
            drafts={"fake": 3},
            draft_tokens={"fake": 9},
            accepted_tokens={"fake": 5},
            accepted_per_pos={"fake": [3, 2]},
            steps=self._steps,
            native_requests=7,
            python_path_requests={"logprobs": 2},
            requests_finished=dict(self._finished),
            nodes=[NODE, NODE],
            node_totals=[NODE | {"late": 6}],
            drafter_weights={"fake": 0.25},
        )

    def _advance(self, request: Request) -> Event:
        params, before = request.sampling, self._written[request.id]
        limit = min(params.max_tokens or DEFAULT_LENGTH, CONTEXT - len(request.prompt))
        if "FOREVER" in self._text.decode(list(request.prompt)):
            limit = sys.maxsize
        after = min(before + 2, limit)
        tokens = tuple(request.prompt[i % len(request.prompt)] for i in range(before, after))
        self._written[request.id] = after
        finish = FinishReason.LENGTH if after == limit else None
        text = self._text.decode(list(tokens), skip_special_tokens=False)
        for stop in params.stop:
            if stop in text:
                text, finish = text[: text.index(stop)], FinishReason.STOP
        if finish is not None:
            del self._requests[request.id]
            self._finished[finish.value] += 1
        return Event(
            id=request.id,
            parent=request.parent,
            index=request.index,
            text=text,
            tokens=tokens,
            sources=("fake", "bonus")[: len(tokens)],
            logprobs=self._logprobs(tokens, params.logprobs),
            prompt_logprobs=self._prompt_logprobs(request) if before == 0 else None,
            finish=finish,
            stop_reason=params.stop[0] if finish is FinishReason.STOP else None,
            stats=_stats(after) if finish is not None else None,
        )

    def _logprobs(self, tokens: tuple[int, ...], top: int | None) -> tuple[TokenLogprobs, ...]:
        if top is None:
            return ()
        return tuple(
            TokenLogprobs(token, -0.5, 1, tuple(((token + i) % self.vocab_size, -0.5 - i) for i in range(top)))
            for token in tokens
        )

    def _prompt_logprobs(self, request: Request) -> tuple[TokenLogprobs | None, ...] | None:
        if request.sampling.prompt_logprobs is None:
            return None
        return (None, *self._logprobs(request.prompt[1:], request.sampling.prompt_logprobs))


def _joined(before: Event | None, event: Event) -> Event:
    if before is None:
        return event
    parts = ("text", "tokens", "sources", "logprobs")
    return replace(
        event,
        prompt_logprobs=before.prompt_logprobs,
        **{name: getattr(before, name) + getattr(event, name) for name in parts},
    )


def _stats(tokens: int) -> RequestStats:
    drafts = tokens // 2
    return RequestStats(
        target_calls=drafts + 1,
        drafts=drafts,
        drafted=2 * drafts,
        accepted=drafts,
        rejections=0,
        accepted_by_drafter={"fake": drafts},
        model_calls={"fake": drafts + 1},
        tokens_by_source={"fake": drafts, "bonus": tokens - drafts},
        ttft=0.25,
        e2e=0.5,
    )


class FakeLLM:
    """``cospec.llm.LLM`` around the fake; ``made`` keeps the instances so that a test can look at them."""

    made: ClassVar[list[FakeLLM]] = []
    tokenizer_folder = ""

    def __init__(self, model: str = "zoo", speculative_config: Any = None, **options: Any) -> None:
        from transformers import AutoTokenizer

        given = {"model": model, "speculative_config": speculative_config, "tokenizer": self.tokenizer_folder}
        self.engine = FakeEngine.build(EngineConfig.build({**given, **options}))
        self.engine.tokenizer = AutoTokenizer.from_pretrained(self.tokenizer_folder)
        self.made.append(self)

    def __enter__(self) -> FakeLLM:
        return self

    def __exit__(self, *_: object) -> None:
        self.engine.close()

    def stream(self, prompt: list[int], params: SamplingParams) -> Iterator[Event]:
        for request in make_requests("stream", prompt, params):
            self.engine.add(request)
        while self.engine.has_work:
            yield from self.engine.step()
