"""Reads prompts from files. The content determines the format, so no option names the format.

| format     | a line, or an item of one JSON list                        | domain                    |
| ---------- | ---------------------------------------------------------- | ------------------------- |
| Spec-Bench | ``question_id``, ``category``, ``turns``                   | ``category``              |
| HumanEval  | ``task_id``, ``prompt``, ``canonical_solution``            | ``code``                  |
| GSM8K      | ``question``, ``answer``                                   | ``math``                  |
| plain      | ``prompt``, or ``turns`` with or without ``id``            | ``category``, if there    |
| ShareGPT   | ``conversations`` of ``from`` and ``value``, or ``messages`` | ``category``, if there  |

Of several turns only the first is the prompt, because later turns depend on the system's answers.
"""

from __future__ import annotations

import json
import random
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from cospec.bench.request_record import Prompt
from cospec.errors import InvalidInput, words

FORMATS = "Spec-Bench, HumanEval, GSM8K, ShareGPT, or plain lines with prompt or turns"
HUMAN = ("human", "user")
MODEL = ("gpt", "assistant", "chatgpt", "bing", "bard")


def load(path: Path) -> list[Prompt]:
    """Read all prompts of a file of JSON lines or of one JSON list.

    Raises:
        InvalidInput: the file is unreadable, empty, or of another format. The error names the line.
    """
    found = [_prompt(item, where, path) for where, item in _items(path)]
    prompts = [prompt for prompt in found if prompt is not None]
    if not prompts:
        raise InvalidInput("dataset_path", words(f"{path}, which holds no prompts"), FORMATS)
    return prompts


def load_all(paths: Sequence[Path]) -> list[Prompt]:
    """Read the prompts of several files; a prompt without a domain gets the file's name."""
    return [
        prompt if prompt.category else Prompt(prompt.id, prompt.text, path.stem, prompt.reference)
        for path in paths
        for prompt in load(path)
    ]


def sample(prompts: Sequence[Prompt], n: int, seed: int) -> list[Prompt]:
    """Return ``n`` prompts, in turn from every domain, in an order drawn by ``seed``; repeats start after all prompts.

    Domains alternate, so that an interrupted run has covered all domains. Repeated prompts get new ids.

    Raises:
        InvalidInput: ``n`` is below 1.
    """
    if n < 1:
        raise InvalidInput("num_prompts", n, "a whole number from 1 up")
    shuffler = random.Random(seed)
    domains: dict[str, list[Prompt]] = defaultdict(list)
    for prompt in prompts:
        domains[prompt.category].append(prompt)
    for members in domains.values():
        shuffler.shuffle(members)
    order = list(_interleaved(list(domains.values())))
    again = [(order[i % len(order)], i // len(order)) for i in range(n)]
    return [_renamed(prompt, f"{prompt.id}#{lap}") if lap else prompt for prompt, lap in again]


def _interleaved(domains: Sequence[Sequence[Prompt]]) -> Iterator[Prompt]:
    for i in range(max(map(len, domains))):
        yield from (domain[i] for domain in domains if i < len(domain))


def _renamed(prompt: Prompt, id: str) -> Prompt:
    return Prompt(id, prompt.text, prompt.category, prompt.reference)


def _items(path: Path) -> Iterator[tuple[str, Any]]:
    """Yield the objects of a file, each with its position in words."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or error
        raise InvalidInput("dataset_path", str(path), f"a readable text file ({why})") from None
    if text.lstrip().startswith("["):
        try:
            listed = json.loads(text)
        except json.JSONDecodeError as error:
            raise _bad(path, f"line {error.lineno}", f"not JSON ({error.msg})") from None
        yield from ((f"item {number}", item) for number, item in enumerate(listed, start=1))
        return
    for number, line in enumerate(text.splitlines(), start=1):
        if line.strip():
            try:
                yield f"line {number}", json.loads(line)
            except json.JSONDecodeError as error:
                raise _bad(path, f"line {number}", f"not JSON ({error.msg})") from None


def _prompt(item: Any, where: str, path: Path) -> Prompt | None:
    """Return the prompt of an object; None for a conversation without a human message."""
    if not isinstance(item, Mapping):
        raise _bad(path, where, f"{type(item).__name__}, not an object")
    for keys, read in READERS:
        if all(key in item for key in keys):
            try:
                return read(item, where)
            except (KeyError, TypeError, IndexError, AttributeError):
                raise _bad(path, where, f"an object whose {keys[-1]} is unreadable") from None
    raise _bad(path, where, "an object with " + (", ".join(map(str, item)) or "no keys"))


def _bad(path: Path, where: str, found: str) -> InvalidInput:
    return InvalidInput(f"{path.name}, {where},", words(found), FORMATS)


def _text(value: Any) -> str:
    if not isinstance(value, str) or not value:
        raise TypeError("a prompt is a non-empty string")
    return value


def _human_eval(item: Mapping[str, Any], where: str) -> Prompt:
    return Prompt(_text(item["task_id"]), _text(item["prompt"]), "code", str(item.get("canonical_solution", "")))


def _gsm8k(item: Mapping[str, Any], where: str) -> Prompt:
    text = f"Question: {_text(item['question'])}\nAnswer:"
    return Prompt(str(item.get("id", where)), text, "math", str(item["answer"]))


def _turns(item: Mapping[str, Any], where: str) -> Prompt:
    if not isinstance(item["turns"], list):
        raise TypeError("turns are a list")
    id = item.get("question_id", item.get("id", where))
    return Prompt(str(id), _text(item["turns"][0]), str(item.get("category", "")), _first(item.get("reference", "")))


def _plain(item: Mapping[str, Any], where: str) -> Prompt:
    category = str(item.get("category", ""))
    return Prompt(str(item.get("id", where)), _text(item["prompt"]), category, _first(item.get("reference", "")))


def _share_gpt(item: Mapping[str, Any], where: str) -> Prompt | None:
    return _conversation(item, where, [(turn["from"], turn["value"]) for turn in item["conversations"]])


def _messages(item: Mapping[str, Any], where: str) -> Prompt | None:
    return _conversation(item, where, [(turn["role"], turn["content"]) for turn in item["messages"]])


def _conversation(item: Mapping[str, Any], where: str, turns: Sequence[tuple[str, str]]) -> Prompt | None:
    """Return the first human message, and the answer."""
    opening = next((i for i, (who, text) in enumerate(turns) if who in HUMAN and text), None)
    if opening is None:
        return None
    answer = next((text for who, text in turns[opening + 1 :] if who in MODEL), "")
    return Prompt(str(item.get("id", where)), _text(turns[opening][1]), str(item.get("category", "")), answer)


def _first(value: Any) -> str:
    """Return a reference, which may be a text or a list with one text per turn."""
    if isinstance(value, list):
        value = value[0] if value else ""
    return str(value)


# Keys that identify a format, the most specific first.
READERS: tuple[tuple[tuple[str, ...], Callable[[Mapping[str, Any], str], Prompt | None]], ...] = (
    (("task_id", "prompt"), _human_eval),
    (("question", "answer"), _gsm8k),
    (("conversations",), _share_gpt),
    (("messages",), _messages),
    (("turns",), _turns),
    (("prompt",), _plain),
)
