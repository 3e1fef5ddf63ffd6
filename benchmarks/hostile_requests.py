"""Mutated and hostile HTTP requests, drawn from a seed: invalid parts in valid bodies, raw bytes, known attacks."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any


class SendMode(Enum):
    """How the bytes are sent."""

    WHOLE = "whole"
    CLOSE_EARLY = "close early"  # closes the connection right after the request
    CLOSE_INSIDE = "close inside"  # closes the connection in the middle of the body
    SLOW = "slow"  # sends the body in pieces, with pauses
    HALF_OPEN = "half open"  # sends the head without its end, and waits


@dataclass(frozen=True, slots=True)
class HostileRequest:
    """One request.

    Attributes:
        family: the group of the request in the report.
    """

    family: str
    path: str
    body: bytes
    send_mode: SendMode = SendMode.WHOLE
    method: str = "POST"
    headers: Mapping[str, str] | None = None

    def head(self) -> bytes:
        """Return request line and headers."""
        given = {"Host": "127.0.0.1", "Content-Type": "application/json", "Connection": "close"}
        given |= {"Content-Length": str(len(self.body)), **(self.headers or {})}
        lines = [f"{self.method} {self.path} HTTP/1.1", *(f"{name}: {value}" for name, value in given.items())]
        return "\r\n".join([*lines, "", ""]).encode("latin-1", "replace")


Body = dict[str, Any]

VALID: tuple[tuple[str, Body], ...] = (
    ("/v1/completions", {"prompt": "It was", "max_tokens": 4}),
    ("/v1/completions", {"prompt": ["a", "b c"], "max_tokens": 3, "temperature": 0.7, "seed": 1, "logprobs": 2}),
    ("/v1/completions", {"prompt": [68, 805, 1205], "max_tokens": 4, "stream": True, "stop": ["the", "."]}),
    (
        "/v1/completions",
        {"prompt": "def f(", "max_tokens": 6, "n": 2, "speculation": {"length": 3, "acceptance_method": "block"}},
    ),
    ("/v1/completions", {"prompt": "x y", "max_tokens": 2, "echo": True, "logprobs": 1, "prompt_logprobs": 1}),
    ("/v1/completions", {"prompt": "a", "max_tokens": 5, "logit_bias": {"5": 1.5}, "top_k": 5, "min_p": 0.1}),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4, "temperature": 0}),
    (
        "/v1/chat/completions",
        {
            "messages": [
                {"role": "system", "content": "Be brief."},
                {"role": "user", "content": [{"type": "text", "text": "Hi"}]},
            ],
            "max_completion_tokens": 4,
            "stream": True,
            "stream_options": {"include_usage": True},
            "logprobs": True,
            "top_logprobs": 2,
        },
    ),
    ("/tokenize", {"prompt": "dark night", "return_token_strs": True}),
    ("/tokenize", {"messages": [{"role": "user", "content": "Hi"}]}),
    ("/detokenize", {"tokens": [68, 805, 1205]}),
)

FIELDS = (
    "model", "n", "best_of", "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty",
    "frequency_penalty", "logit_bias", "seed", "stop", "stop_token_ids", "include_stop_str_in_output", "ignore_eos",
    "skip_special_tokens", "min_tokens", "max_tokens", "max_completion_tokens", "prompt_logprobs", "logprobs", "echo",
    "top_logprobs", "priority", "stream", "stream_options", "speculation", "distribution", "user", "metadata", "tools",
    "response_format", "add_special_tokens", "add_generation_prompt", "return_token_ids", "return_sources", "prompt",
    "messages", "tokens", "suffix", "include_speculation_stats", "chat_template_kwargs", "reasoning_effort",
)  # fmt: skip

NUMBERS = (
    0, -0.0, 1, -1, 2, 1e-38, 1e-308, 5e-324, 1e38, 1e308, -1e308, 1.7976931348623157e308, 2**31, 2**53 + 1, 2**63 - 1,
    2**63, -(2**63), -(2**63) - 1, 2**64, 2**70, 10**400, 0.1, 0.999999999999, 1.0000000001, 100, 100.1, 128, 129, 4096,
    float("inf"), float("-inf"), float("nan"),
)  # fmt: skip

TEXTS = (
    "", " ", "\0", "\ud800", "\udfff x", "e\u0301" * 50, "\u202e", "﷽" * 100, "🏳️‍🌈" * 30, "<|endoftext|>",
    "<|im_start|>system\n", "<eos></s>[INST]", "{{ 7 * 7 }}{% for i in range(9) %}", "${jndi:ldap://x}", "' OR 1=1 --",
    "../../etc/passwd", "a" * 20000, "\n" * 3000, "\r\n\r\nHTTP/1.1 200 OK\r\n\r\n", "null", "NaN", "\ufeff",
    "\x1b[2J", "%s%n%x",
)  # fmt: skip

RULES = ("auto", "match", "rejection", "block", "recursive", "typical", "nothing")
POLICIES = ("off", "fixed", "slope", "confidence", "goodput", "milp", "nothing")


def _nested(depth: int, list_too: bool) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = [value] if list_too else {"a": value}
    return value


def any_value(draw: random.Random) -> Any:
    """Return a value of any type and size."""
    kind = draw.randrange(12)
    if kind < 4:
        return draw.choice(NUMBERS)
    if kind < 7:
        return draw.choice(TEXTS)
    if kind == 7:
        return draw.choice((None, True, False, [], {}, [[]], [{}], {"": ""}))
    if kind == 8:
        return [draw.choice(NUMBERS) for _ in range(draw.choice((1, 10, 2000)))]
    if kind == 9:
        return [draw.choice(TEXTS) for _ in range(draw.choice((1, 4, 30)))]
    if kind == 10:
        return {draw.choice(TEXTS): draw.choice(NUMBERS) for _ in range(5)}
    return _nested(draw.choice((2, 50, 400)), draw.random() < 0.5)


def _extremes(draw: random.Random) -> Body:
    """Return extreme sampling parameters inside the documented bounds, many together."""
    ends: dict[str, tuple[Any, ...]] = {
        "temperature": (0, 1e-300, 1e-5, 1, 100),
        "top_p": (1e-300, 1e-9, 0.5, 1),
        "top_k": (-1, 0, 1, 2**62),
        "min_p": (0, 1e-300, 1),
        "repetition_penalty": (1e-300, 1e-38, 0.01, 1, 100),
        "presence_penalty": (-2, 2),
        "frequency_penalty": (-2, 2),
        "logit_bias": ({"0": 100}, {"5": -100, "6": 100}, {str(id): -100 for id in range(4000)}),
        "seed": (0, -1, 2**63, 2**64 - 1),
        "min_tokens": (0, 6),
        "ignore_eos": (True, False),
        "logprobs": (0, 1, 20),
        "prompt_logprobs": (0, 20),
        "include_stop_str_in_output": (True,),
    }
    chosen = draw.sample(sorted(ends), draw.randint(1, len(ends)))
    body: Body = {name: draw.choice(ends[name]) for name in chosen}
    speculation = {
        "length": draw.choice((0, 1, 4, 64)),
        "acceptance_method": draw.choice(RULES),
        "policy": draw.choice(POLICIES),
    }
    body["speculation"] = {key: speculation[key] for key in draw.sample(sorted(speculation), draw.randint(0, 3))}
    return {"prompt": draw.choice(("It was it was it was", "a a a a a a", [5] * 40)), "max_tokens": 6, **body}


def _mutated(draw: random.Random) -> tuple[str, Body]:
    path, valid = draw.choice(VALID)
    body: Body = json.loads(json.dumps(valid))
    for _ in range(draw.choice((1, 1, 1, 2, 3))):
        way = draw.randrange(8)
        if way == 0:
            body.pop(draw.choice(sorted(body)), None) if body else None
        elif way == 1:
            body[draw.choice(TEXTS)[:40]] = any_value(draw)
        elif way == 2:
            keys = ("enabled", "length", "acceptance_method", "policy", "drafters", draw.choice(TEXTS)[:9])
            options = (any_value(draw), draw.choice(RULES), draw.choice(POLICIES))
            body["speculation"] = {draw.choice(keys): draw.choice(options)}
        elif way == 3 and "messages" in body:
            body["messages"] = [{"role": draw.choice(("user", "tool", 5)), draw.choice(FIELDS): any_value(draw)}]
        elif way == 4:
            body["distribution"] = {"blend": draw.choice(("weighted", "single", 5)), "weights": any_value(draw)}
        else:
            body[draw.choice(FIELDS)] = any_value(draw)
    return path, _shortened(body) if draw.random() < 0.9 else body


def _shortened(body: Body) -> Body:
    """Return the body with few output tokens, so that thousands of requests end in minutes."""
    for name, most in (("max_tokens", 64), ("max_completion_tokens", 64), ("n", 8)):
        value = body.get(name)
        if isinstance(value, int | float) and value > most:
            body[name] = most
    if "messages" in body and body.get("max_tokens") is None and body.get("max_completion_tokens") is None:
        body["max_tokens"] = 4  # an answer without a limit fills the context
    return body


def _raw(draw: random.Random) -> bytes:
    good = json.dumps(VALID[0][1]).encode()
    return draw.choice(
        (
            b"", b"{", b"[]", b"null", b'"text"', b"1", good[:-3], good + b"}", good.decode().encode("utf-16"),
            b"\xef\xbb\xbf" + good, b"\xff\xfe\x00", b"\x1f\x8b\x08\x00" + good, b"[" * 100_000, b'{"a":' * 20_000,
            b'{"prompt": "a", "prompt": 5}', b'{"prompt": "\\ud800"}', b'{"prompt": "a", "seed": ' + b"9" * 5000 + b"}",
            b'{"prompt": "a", "temperature": NaN}', b'{"prompt": "a", "temperature": 1e999}', b"\0" * 1000,
            b'{"prompt": "a", "max_tokens": 1, "logit_bias": {"1": Infinity}}', draw.randbytes(500),
        )
    )  # fmt: skip


def _dumps(body: Body) -> bytes:
    return json.dumps(body).encode()


# Attacks from a review of the server, with the sizes of the review. The attacks are expensive, so they are rare.
ATTACKS: Mapping[str, Callable[[], tuple[str, Body]]] = {
    "list of objects": lambda: ("/v1/completions", {"prompt": [{}] * 300_000}),
    "list of words": lambda: ("/v1/completions", {"prompt": [7, *["x"] * 200_000]}),
    "many prompts": lambda: ("/v1/completions", {"prompt": ["a"] * 100_000, "max_tokens": 1}),
    "many stop strings": lambda: ("/v1/completions", {"prompt": "a", "stop": [f"s{i}" for i in range(30_000)]}),
    "many outputs": lambda: ("/v1/completions", {"prompt": ["a"] * 157, "n": 128, "max_tokens": 1}),
    "long prompt": lambda: ("/v1/completions", {"prompt": "It was. " * 120_000, "max_tokens": 1}),
    "long conversation": lambda: ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}] * 20_000}),
    "long text": lambda: ("/tokenize", {"prompt": "été 🏳️‍🌈 " * 60_000, "return_token_strs": True}),
    "many tokens": lambda: ("/detokenize", {"tokens": [5] * 300_000}),
    "unknown tokens": lambda: ("/detokenize", {"tokens": [10**9] * 100_000}),
    "long body": lambda: ("/v1/completions", {"prompt": "a", "user": "x" * (3 * 2**20)}),
}

PENALTY: Body = {"prompt": "It was it was it was", "max_tokens": 6, "repetition_penalty": 1e-38, "logprobs": 1}
SMALL: Mapping[str, Callable[[random.Random], tuple[str, Body]]] = {
    "penalty": lambda draw: (
        "/v1/completions",
        {
            **PENALTY,
            "speculation": {"length": 4, "acceptance_method": draw.choice(("typical", "recursive", "match", "block"))},
        },
    ),
    "priority": lambda _: ("/v1/completions", {"prompt": "a", "max_tokens": 8, "priority": -(2**63)}),
    "distribution": lambda _: (
        "/v1/completions",
        {"prompt": "a", "distribution": {"blend": "weighted", "weights": [1e308, 1e308]}},
    ),
    "special token": lambda _: (
        "/v1/completions",
        {"prompt": "a<|endoftext|>b", "max_tokens": 2, "add_special_tokens": False, "return_token_ids": True},
    ),
}

OTHERS: tuple[tuple[str, str, Mapping[str, str]], ...] = (
    ("GET", "/v1/models/../../etc/passwd", {}),
    ("GET", "/v1/models/%00", {}),
    ("GET", "/v1/models/", {"Host": "evil.example"}),
    ("DELETE", "/v1/completions", {}),
    ("OPTIONS", "/v1/completions", {"Origin": "http://evil.example", "Access-Control-Request-Method": "POST"}),
    ("POST", "/metrics", {}),
    ("GET", "/health?" + "x" * 5000, {}),
    ("GET", "/" + "a/" * 2000, {}),
    ("GET", "/docs", {"X-Request-Id": "\x80" * 200}),
    ("POST", "/v1/completions", {"Content-Length": "-5"}),
    ("POST", "/v1/completions", {"Content-Length": "99999999999999999999"}),
    ("POST", "/v1/completions", {"Transfer-Encoding": "chunked"}),
    ("POST", "/v1/completions", {"Authorization": "Bearer " + "x" * 7000}),
    ("BREW", "/v1/completions", {}),
)


def requests(count: int, seed: int, attacks_every: int = 250) -> list[HostileRequest]:
    """Yield ``count`` requests; every ``attacks_every`` requests the next attack of ``ATTACKS``."""
    draw, found, names = random.Random(seed), [], sorted(ATTACKS)
    for number in range(count):
        if number % attacks_every == attacks_every // 2:
            name = names[number // attacks_every % len(names)]
            path, body = ATTACKS[name]()
            found.append(HostileRequest(name, path, _dumps(body)))
        else:
            found.append(_one(draw))
    return found


def _one(draw: random.Random) -> HostileRequest:
    kind = draw.random()
    if kind < 0.55:
        path, body = _mutated(draw)
        return HostileRequest("mutated", path, _dumps(body), _send_mode(draw))
    if kind < 0.70:
        return HostileRequest("extremes", "/v1/completions", _dumps(_extremes(draw)))
    if kind < 0.80:
        return HostileRequest("raw body", draw.choice(VALID)[0], _raw(draw), _send_mode(draw))
    if kind < 0.88:
        name = draw.choice(sorted(SMALL))
        path, body = SMALL[name](draw)
        return HostileRequest(name, path, _dumps(body))
    if kind < 0.93:
        method, path, headers = draw.choice(OTHERS)
        send_mode = SendMode.CLOSE_EARLY if "Content-Length" in headers else SendMode.WHOLE  # a body that never arrives
        return HostileRequest("paths and headers", path, b"", send_mode, method, headers)
    send_mode = draw.choice(
        (SendMode.CLOSE_EARLY, SendMode.CLOSE_EARLY, SendMode.CLOSE_INSIDE, SendMode.SLOW, SendMode.HALF_OPEN)
    )
    body = {"prompt": "It was", "max_tokens": 30, "stream": draw.random() < 0.7}
    return HostileRequest(send_mode.value, "/v1/completions", _dumps(body), send_mode)


def _send_mode(draw: random.Random) -> SendMode:
    return draw.choices((SendMode.WHOLE, SendMode.CLOSE_EARLY, SendMode.CLOSE_INSIDE), (90, 7, 3))[0]
