"""``cospec chat``: the conversation, the commands, the colours."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import Result

from cospec.cli.chat import SourceSpans
from cospec.core.types import Event
from cospec.sampling_params import SamplingParams
from cospec.text.tokenizer import TextTokenizer
from server.fake_engine import FakeEngine, FakeLLM

Command = Callable[..., Result]


def talk(cospec_command: Command, *lines: str, arguments: tuple[object, ...] = ("--max-tokens", 6)) -> str:
    result = cospec_command("chat", *arguments, input="".join(line + "\n" for line in lines))
    assert result.exit_code == 0, result.output
    return result.output


def test_answers_and_remembers(llm: type[FakeLLM], cospec_command: Command) -> None:
    out = talk(cospec_command, "A", "B", arguments=("--max-tokens", 20))
    assert "u: A\na:u: A\na:u: A\n" in out
    assert out.count("u: A") >= 3
    # The second prompt begins with the first exchange, which the fake repeats.
    assert "u: A\na: u: A" in out


def test_reset_forgets(llm: type[FakeLLM], cospec_command: Command) -> None:
    out = talk(cospec_command, "A", "/reset", "B", arguments=("--max-tokens", 4))
    assert "u: B" in out


def test_commands(llm: type[FakeLLM], cospec_command: Command) -> None:
    out = talk(cospec_command, "/stats", "/help", "/what", "A", "/stats", "/quit", "never")
    assert "There is no answer yet" in out
    assert "/reset  forget the conversation" in out
    assert "/what is unknown" in out
    assert "mean acceptance length" in out
    assert "never" not in out


def test_too_long_a_conversation_is_reported_and_chat_goes_on(llm: type[FakeLLM], cospec_command: Command) -> None:
    out = talk(cospec_command, "x" * 400, "A")
    assert "messages is" in out
    assert "/reset" in out
    assert "u: A" in out


def test_failed_answer_is_not_kept(
    llm: type[FakeLLM], cospec_command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts: list[list[int]] = []

    def failing(self: FakeLLM, prompt: list[int], params: SamplingParams) -> Iterator[Event]:
        prompts.append(prompt)
        yield event("half", [], [])
        yield replace(event("", [], []), error="It broke.")

    monkeypatch.setattr(llm, "stream", failing)
    out = talk(cospec_command, "A", "A")
    assert out.count("It broke.") == out.count("/reset") == 2
    first, second = prompts
    assert first == second


def test_wrong_options(llm: type[FakeLLM], cospec_command: Command) -> None:
    result = cospec_command("chat", "--top-p", "7")
    assert (result.exit_code, "top_p is 7.0" in result.stderr) == (1, True)


def test_control_characters_do_not_reach_the_terminal(llm: type[FakeLLM], cospec_command: Command) -> None:
    out = talk(cospec_command, "A\x1b]0;title\x07B", arguments=("--max-tokens", 30))
    answer = out.split("> ", 1)[1]
    assert "u: A]0;titleB" in answer
    assert "\x1b" not in answer
    assert "\x07" not in answer


def event(text: str, tokens: list[int], sources: list[str]) -> Event:
    return Event("id", "", 0, text, tuple(tokens), tuple(sources))


def test_pieces_follow_their_tokens(tokenizer_folder: Path) -> None:
    from transformers import AutoTokenizer

    tokens = TextTokenizer(AutoTokenizer.from_pretrained(tokenizer_folder), FakeEngine.max_model_len, 300)
    pieces = SourceSpans(tokens)
    a, b, *e = tokens.encode("abé")
    assert pieces.split(event("ab", [a, b], ["small", "target"])) == [("a", "small"), ("b", "target")]
    # Half a character has no text yet; it takes the source of its first byte.
    assert pieces.split(event("", [e[0]], ["small"])) == []
    assert pieces.split(event("éa", [e[1], a], ["target", "target"])) == [("é", "small"), ("a", "target")]
    # Text that no token accounts for must not be lost.
    assert pieces.split(event("zz", [], [])) == [("zz", "target")]
